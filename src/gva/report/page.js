(() => {
  const { palette, plots, rows, lead, baseline, many } = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  let picked = null;  // the row that stands out; else the two of `lead`, where rows are many
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
    const { zero_x: zeroX, levels = [], ...own } = figure.layout;
    const axis = {
      gridcolor: colors.line, zeroline: false, linecolor: colors.axis, ticks: "", automargin: true,
      tickfont: { color: colors.soft, size: 12 }, title: { font: { color: colors.soft, size: 13 }, standoff: 10 },
    };
    const line = (extra) => ({ type: "line", line: { color: colors.soft, width: 1.2, dash: "dot" }, ...extra });
    const shapes = [], annotations = [];
    for (const { y } of levels) shapes.push(line({ xref: "paper", x0: 0, x1: 1, y0: y, y1: y }));
    if (zeroX) {
      shapes.push(line({ yref: "paper", y0: 0, y1: 1, x0: 0, x1: 0 }));
      annotations.push({ showarrow: false, font: { color: colors.soft, size: 12 }, yref: "paper", y: 1, yanchor: "bottom", x: 0, text: zeroX });
    }
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colors.ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: lead.length ? "closest" : "x unified",
      hoverlabel: { namelength: -1, bgcolor: colors.card, bordercolor: colors.axis, font: { color: colors.ink, size: 13 } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { color: colors.soft, size: 12 } },
      margin: { l: 56, r: 16, t: zeroX ? 24 : 12, b: 44 }, ...own, shapes, annotations,
      xaxis: { ...axis, ...own.xaxis, title: { ...axis.title, ...own.xaxis.title } },
      yaxis: { ...axis, ...own.yaxis, title: { ...axis.title, ...own.yaxis.title } },
    };
  }

  /** How a row is seen beside the others: one that was picked, and the baseline, stand out; else those of `lead`. */
  function strength(row, crowded) {
    if (row === undefined || row === null) return "plain";
    if (picked !== null) return row === picked || row === baseline ? "strong" : "faint";
    return !crowded ? "plain" : lead.includes(row) ? "strong" : "quiet";
  }

  const STRENGTH = { strong: 1, plain: 1, quiet: 0.5, faint: 0.22 };

  /** The traces as they are seen now, what stands out on top; of what does not, no seeds. */
  function seen(traces, crowded) {
    const drawn = traces.filter((trace) => !hidden.has(trace.meta?.row)).map((trace) => {
      const lines = trace.mode.startsWith("lines"), how = strength(trace.meta?.row, crowded), opacity = STRENGTH[how];
      if (how === "plain") return { trace, how };
      const line = lines && { ...trace.line, width: trace.meta.seed ? 1 : how === "strong" ? 2.8 : 1.4 };
      const visible = !(lines && trace.meta.seed && how !== "strong");
      return { how, trace: { ...trace, opacity: opacity * (trace.opacity ?? 1), visible, ...(lines && { line }) } };
    });
    return [...drawn].sort((a, b) => (a.how === "strong") - (b.how === "strong")).map(({ trace }) => trace);
  }

  /** On a narrow card the names of a category axis stand above their marks, not beside them. */
  function categoriesInside(layout, colors) {
    layout.yaxis = { ...layout.yaxis, showticklabels: false };
    layout.margin.l = 8;
    for (const name of layout.yaxis.categoryarray) layout.annotations.push({
      xref: "paper", x: 0, xanchor: "left", yref: "y", y: name, yanchor: "bottom", yshift: 5, showarrow: false, borderpad: 0,
      bgcolor: colors.card, text: name, font: { color: colors.soft, size: 11.5 },
    });
  }

  async function draw(card) {
    const { figure, height, views } = plots[card.dataset.plot];
    const div = card.querySelector(".plot"), colors = palette[theme()], layout = layoutOf(figure, colors);
    const planned = labels.plan(figure, (row) => !hidden.has(row), card, rows);
    const crowded = lead.length > 0 && planned.told.length > many && planned.told.some((trace) => trace.mode.startsWith("lines"));
    const look = (row) => {
      const how = strength(row, crowded);
      const opacity = how === "quiet" ? 0.85 : how === "faint" ? 0.55 : 1;
      return { color: row === undefined ? colors.soft : colors[`row:${row}`], opacity, strong: how === "strong" };
    };
    Object.assign(layout, { width: div.clientWidth, height: Math.max(height, planned.height) });
    layout.margin.r += planned.margin;
    if (card.clientWidth < 520 && layout.yaxis.categoryarray) categoriesInside(layout, colors);
    const view = Number(card.querySelector("[data-view][aria-pressed=true]")?.dataset.view ?? 0);
    for (const axis of views.length ? ["xaxis", "yaxis"] : [])
      layout[axis] = { ...layout[axis], range: views[view]?.[axis], autorange: !views[view]?.[axis] };
    div.style.height = `${layout.height}px`;
    const data = painted(seen(figure.data, crowded), colors);
    await Plotly.react(div, data, layout, { displaylogo: false, displayModeBar: false, doubleClick: "reset+autosize" });
    if (planned.told.length || figure.layout.levels?.length) {
      const added = labels.annotations(div, figure, planned, look);
      await Plotly.relayout(div, { annotations: [...layout.annotations, ...added] });
    }
    labels.key(card, planned, look, rows);
    if (!div.dataset.heard) div.on("plotly_clickannotation", ({ annotation }) => annotation.name in rows && pick(annotation.name));
    div.dataset.heard = "yes";
  }

  const cards = [...document.querySelectorAll("[data-plot]")];
  const drawAll = async () => { for (const card of cards) await draw(card); };

  /** Make a row stand out everywhere, or, if it does, no row. */
  function pick(row) {
    picked = picked === row ? null : row;
    for (const part of document.querySelectorAll("[data-row]")) {
      const here = part.dataset.row === picked;
      part.classList.toggle("picked", here);
      part.querySelector(".pick")?.setAttribute("aria-pressed", here);
    }
    told();
    drawAll();
  }

  /** What stands out, beside the count of rows. */
  function told() {
    const place = document.getElementById("picked");
    const names = (picked === null ? lead : [picked]).map((row) => rows[row].label);
    if (place) place.textContent = names.length ? ` · ${names.join(" and ")} ${names.length > 1 ? "stand" : "stands"} out` : "";
  }

  function listen() {
    told();
    document.getElementById("theme").addEventListener("click", () => {
      document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
      drawAll();
    });
    system.addEventListener("change", drawAll);
    for (const box of document.querySelectorAll(".shown")) box.addEventListener("change", () => {
      const row = box.parentElement.dataset.row;
      box.checked ? hidden.delete(row) : hidden.add(row);
      for (const part of document.querySelectorAll("tr[data-row], .bar[data-row]")) if (part.dataset.row === row) part.hidden = !box.checked;
      drawAll();
    });
    for (const button of document.querySelectorAll(".pick")) button.addEventListener("click", () => pick(button.parentElement.dataset.row));
    const legend = document.querySelector(".legend");
    if (legend && innerWidth < 820) legend.open = false;
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
