"use strict";
/** Names of lines and points, each beside what it names and none on another: where names would take too much of the
 * width, numbers stand there, and a list below the plot says whose they are. */
const labels = (() => {
  const PITCH = 15, LEAD = 16, FONT = 12.5;
  const context = document.createElement("canvas").getContext("2d");

  function width(text) {
    context.font = `600 ${FONT}px ${getComputedStyle(document.body).fontFamily}`;
    return context.measureText(text).width;
  }

  const isLine = (trace) => trace.mode.startsWith("lines");

  /** What is to be named, before anything is drawn: how, how wide it is, and how much room all of it takes. */
  function plan(figure, shown, card, rows) {
    const told = figure.data.filter((trace) => trace.meta?.label && shown(trace.meta.row));
    const levels = figure.layout.levels ?? [];
    const widest = Math.max(0, ...told.map((trace) => width(rows[trace.meta.row].label)), ...levels.map(({ text }) => width(text)));
    const full = told.length > 0 && widest + LEAD < 0.36 * card.clientWidth;
    const words = (trace) => (full ? trace.meta.label : String(rows[trace.meta.row].number));
    const beside = told.some(isLine) || (full && levels.length > 0);
    const margin = !told.length ? 0 : full ? (beside ? widest + LEAD + 4 : 12) : LEAD + 16;
    return { told, full, words, margin, height: told.length ? (told.length + (full ? levels.length : 0)) * PITCH + 76 : 0 };
  }

  /** Push names apart along y, those that crowd one another as a block around the middle of their wished places. */
  function spread(items, length) {
    const blocks = [], top = ({ items: held }) => {
      const wished = held.reduce((sum, item, i) => sum + item.at - i * PITCH, 0) / held.length;
      return Math.max(6, Math.min(wished, length - 4 - (held.length - 1) * PITCH));
    };
    for (const item of items.sort((a, b) => a.at - b.at)) {
      let block = { items: [item] };
      for (let above; (above = blocks.at(-1)) && top(above) + above.items.length * PITCH > top(block); blocks.pop())
        block = { items: [...above.items, ...block.items] };
      blocks.push(block);
    }
    for (const block of blocks) block.items.forEach((item, i) => { item.place = top(block) + i * PITCH; });
  }

  /** Points that stand close share a column of names: right of them where there is room before the next, else left, else
   * with the next. */
  function columns(items, total) {
    const found = [];
    let column = null, taken = 0;
    items.sort((a, b) => a.x - b.x).forEach((item, i) => {
      column ??= { items: [], from: item.x };
      column.items.push(item);
      const wide = LEAD + Math.max(...column.items.map((one) => one.wide)), next = items[i + 1]?.x ?? total + 20;
      if (items[i + 1] && next - item.x < 60) return;
      const right = item.x + wide < next - 10, left = column.from - wide > taken;
      if (!right && !left && items[i + 1]) return;
      for (const one of column.items) Object.assign(one, { right, anchor: right ? item.x + LEAD : column.from - LEAD });
      taken = item.x + (right ? wide : 10);
      found.push(column.items);
      column = null;
    });
    return found;
  }

  /** The names as annotations, each led to its place by a line; `look` gives colour, strength and weight of a row. */
  function annotations(div, figure, { told, full, words }, look) {
    const { xaxis, yaxis } = div._fullLayout, length = yaxis._length, total = xaxis._length;
    const inside = (value, axis) => { const p = axis.d2p(value); return p >= -1 && p <= axis._length + 1; };
    const lines = [], points = [], quiet = [];
    for (const trace of told) {
      const { x, y, meta } = trace, last = x.findLastIndex((value, i) => inside(value, xaxis) && inside(y[i], yaxis));
      if (last < 0) continue;
      const at = yaxis.d2p(y[last]), text = words(trace), item = { text, at, row: meta.row, wide: width(text) + 6 };
      item.x = xaxis.d2p(x[last]);
      isLine(trace) ? lines.push({ ...item, anchor: total + LEAD, right: true }) : points.push(item);
    }
    for (const { y, text } of figure.layout.levels ?? []) {
      if (!inside(y, yaxis)) continue;
      const at = yaxis.d2p(y);
      full ? lines.push({ text, at, x: total, anchor: total + LEAD, right: true }) : quiet.push({ text, at });
    }
    const groups = [lines, ...columns(points, total)];
    for (const group of groups) spread(group, length);
    const paper = { xref: "paper", yref: "paper" };
    const led = groups.flat().map(({ text, row, at, place, x, anchor, right }) => {
      const { color, opacity, strong } = look(row);
      return {
        ...paper, x: x / total, y: 1 - at / length, ax: anchor - x, ay: place - at, text: strong ? `<b>${text}</b>` : text,
        showarrow: true, arrowhead: 0, arrowwidth: 0.8, arrowcolor: color, opacity, borderpad: 1,
        xanchor: right ? "left" : "right", yanchor: "middle", font: { color, size: FONT }, captureevents: Boolean(row), name: row,
      };
    });
    return [...led, ...quiet.map(({ text, at }) => ({
      ...paper, x: 0, y: 1 - at / length, xanchor: "left", yanchor: "bottom", text, showarrow: false,
      font: { color: look(undefined).color, size: 11.5 }, borderpad: 0,
    }))];
  }

  /** The list below a plot that has numbers, in the order of its lines from above; of one with names, nothing. */
  function key(card, { told, full }, look, rows) {
    card.querySelector(".key")?.remove();
    if (full || !told.length) return;
    const list = document.createElement("div"), end = (trace) => trace.y.at(-1);
    list.className = "key";
    for (const trace of [...told].sort((a, b) => end(b) - end(a))) {
      const { color, strong } = look(trace.meta.row), { label, number } = rows[trace.meta.row];
      const entry = document.createElement("span"), digit = document.createElement("b");
      digit.textContent = number;
      digit.style.color = color;
      entry.append(digit, ` ${label}`);
      entry.classList.toggle("strong", strong);
      list.append(entry);
    }
    card.append(list);
  }

  return { plan, annotations, key };
})();

