"use strict";
(() => {
  const { palette, plots } = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => document.documentElement.dataset.theme || (system.matches ? "dark" : "light");

  /** Replace every colour that is given by name ("@ink", "@row:gqa") by the theme's. */
  function painted(value, colors) {
    if (typeof value === "string") return value.startsWith("@") ? colors[value.slice(1)] : value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map((item) => painted(item, colors));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item, colors)]));
    return value;
  }

  /** The look that all plots share. */
  function layoutOf(figure, colors) {
    const { zero, zero_x: zeroX, level, ...own } = figure.layout;
    const axis = {
      gridcolor: colors.line, zeroline: false, linecolor: colors.axis, ticks: "", automargin: true,
      tickfont: { color: colors.soft, size: 12 }, title: { font: { color: colors.soft, size: 13 }, standoff: 10 },
    };
    const line = (extra) => ({ type: "line", line: { color: colors.soft, width: 1.2, dash: "dot" }, ...extra });
    const shapes = [], annotations = [];
    if (zero) shapes.push(line({ xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0 }));
    if (level) shapes.push(line({ xref: "paper", x0: 0, x1: 1, y0: level.y, y1: level.y }));
    if (zeroX) {
      shapes.push(line({ yref: "paper", y0: 0, y1: 1, x0: 0, x1: 0 }));
      annotations.push({ showarrow: false, font: { color: colors.soft, size: 12 }, yref: "paper", y: 1, yanchor: "bottom", x: 0, text: zeroX });
    }
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colors.ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x unified",
      hoverlabel: { bgcolor: colors.card, bordercolor: colors.axis, font: { color: colors.ink, size: 13 } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { color: colors.soft, size: 12 } },
      margin: { l: 56, r: 16, t: zeroX ? 24 : 12, b: 44 }, ...own, shapes, annotations,
      xaxis: { ...axis, ...own.xaxis, title: { ...axis.title, ...own.xaxis.title } },
      yaxis: { ...axis, ...own.yaxis, title: { ...axis.title, ...own.yaxis.title } },
    };
  }

  /** Where names stand: lines are named in the right margin, points beside themselves. */
  function named(div, figure, colors) {
    const { xaxis, yaxis } = div._fullLayout, { zero, level } = figure.layout;
    const inside = (value, axis) => { const p = axis.d2p(value); return p >= -1 && p <= axis._length + 1; };
    const found = [];
    const add = (text, x, y, color, right) => found.push({ text, color, right, x, at: yaxis.d2p(y) });
    for (const { x, y, mode, meta } of figure.data) {
      if (!meta?.label || hidden.has(meta.row)) continue;
      const last = x.findLastIndex((value, i) => inside(value, xaxis) && inside(y[i], yaxis));
      if (last < 0) continue;
      const lines = mode.startsWith("lines");
      add(meta.label, lines ? 1 : xaxis.d2p(x[last]) / xaxis._length, y[last], colors[`row:${meta.row}`], lines || meta.side !== "left");
    }
    if (zero && inside(0, yaxis)) add(zero, 1, 0, colors.soft, true);
    if (level && inside(level.y, yaxis)) add(level.text, 1, level.y, colors.soft, true);
    return found;
  }

  /** Names as annotations, pushed apart where they would overlap. */
  function labels(div, figure, colors) {
    const found = named(div, figure, colors), length = div._fullLayout.yaxis._length, pitch = 16;
    for (const side of [true, false]) {
      const group = found.filter((item) => item.right === side).sort((a, b) => a.at - b.at);
      group.forEach((item, i) => { item.place = i ? Math.max(item.at, group[i - 1].place + pitch) : item.at; });
      group.reduceRight((limit, item) => (item.place = Math.min(item.place, limit)) - pitch, length - 6);
    }
    return found.map(({ text, color, right, x, place }) => ({
      text, xref: "paper", yref: "paper", x, y: 1 - place / length, xanchor: right ? "left" : "right", xshift: right ? 9 : -9,
      yanchor: "middle", showarrow: false, font: { color, size: 12.5 },
    }));
  }

  async function draw(card) {
    const { figure, height, views } = plots[card.dataset.plot];
    const div = card.querySelector(".plot"), colors = palette[theme()], narrow = card.clientWidth < 430;
    const layout = { ...layoutOf(figure, colors), height };
    const told = figure.data.filter((trace) => trace.meta?.label);
    const beside = told.filter((trace) => trace.mode.startsWith("lines")).map((trace) => trace.meta.label);
    if (figure.layout.level) beside.push(figure.layout.level.text);
    const naming = !narrow && (told.length > 0 || beside.length > 0);
    if (naming) layout.margin.r += 7.2 * Math.max(0, ...beside.map((text) => text.length));
    const view = Number(card.querySelector("[data-view][aria-pressed=true]")?.dataset.view ?? 0);
    if (views.length) layout.yaxis = { ...layout.yaxis, range: views[view] ?? undefined, autorange: !views[view] };
    const data = painted(figure.data.filter((trace) => !hidden.has(trace.meta?.row)), colors);
    await Plotly.react(div, data, layout, { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset+autosize" });
    if (naming) await Plotly.relayout(div, { annotations: [...layout.annotations, ...labels(div, figure, colors)] });
  }

  const cards = [...document.querySelectorAll("[data-plot]")];
  const drawAll = async () => { for (const card of cards) await draw(card); };

  function listen() {
    document.getElementById("theme").addEventListener("click", () => {
      document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
      drawAll();
    });
    system.addEventListener("change", drawAll);
    for (const chip of document.querySelectorAll(".chip")) chip.addEventListener("click", () => {
      const row = chip.dataset.row, on = hidden.has(row);
      on ? hidden.delete(row) : hidden.add(row);
      chip.setAttribute("aria-pressed", on);
      for (const part of document.querySelectorAll("tr[data-row], .bar[data-row]")) if (part.dataset.row === row) part.hidden = !on;
      drawAll();
    });
    for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => {
      for (const other of button.parentElement.children) other.setAttribute("aria-pressed", other === button);
      draw(button.closest("[data-plot]"));
    });
    let timer = 0, width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; clearTimeout(timer); timer = setTimeout(drawAll, 150); } });
  }

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  async function start() {
    const script = document.createElement("script");
    script.textContent = await unpack(document.getElementById("library").textContent);
    document.head.append(script);
    listen();
    await drawAll();
    document.documentElement.dataset.drawn = cards.length;
  }

  addEventListener("DOMContentLoaded", () => start().catch((error) => {
    for (const card of cards) card.querySelector(".plot").textContent = "This browser could not draw the plot.";
    console.error(error);
  }));
})();
