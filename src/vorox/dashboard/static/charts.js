// Line charts with uPlot: aligned series, event markers, a readout of the values at the cursor, and zoom.

import { h, replace } from "./dom.js";

const LINES = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6", "--line-7", "--line-8"];
const BINARY_STEPS = Array.from({ length: 60 }, (_, power) => 2 ** power);
const openCharts = new Set();

export function lineColor(index) {
  return LINES[index % LINES.length];
}

function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// series: [{label, color, x, y, faint, points}]; marks: [{x, color, label}].
export function lineChart({ title, unit = "", description = "", height = 180, xFormat = String, yFormat = String,
                            axisFormat = yFormat, isBinary = false, hasNames = false, onHover = null, onZoom = null, group = "charts" }) {
  const readout = h("div", { class: "readout" });
  const canvas = h("div", { class: "plot" });
  const root = h("figure", { class: "chart", title: description || null },
    h("figcaption", null, h("span", { class: "title" }, title), unit && h("span", { class: "unit" }, unit), readout), canvas);
  let plot = null, current = null;

  function showValues(index) {
    if (!current) return;
    const hasRaw = current.series.filter((one) => one.faint).length === 1;  // of one metric, not of several runs
    const items = current.series.map((one, number) => ({ one, values: plot.data[number + 1] })).filter(({ one }) => hasRaw || !one.faint);
    const nameOf = (one) => (!hasRaw ? one.label : one.faint && current.series.length === 2 ? "raw" : current.series.length === 2 ? "smoothed" : one.label);
    replace(readout, items.map(({ one, values }) => {
      let at = index ?? values.length - 1;
      while (at >= 0 && (values[at] === null || values[at] === undefined)) at -= 1;
      const swatch = h("i", { class: "swatch" });
      swatch.style.background = cssColor(one.color);
      swatch.style.opacity = one.faint ? 0.45 : 1;
      return h("span", null, swatch, (hasNames || items.length > 1) && h("span", { class: "name" }, nameOf(one)),
        h("b", null, at < 0 ? "–" : yFormat(values[at])));
    }));
  }

  function drawMarks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const mark of current.marks) {
      const x = Math.round(u.valToPos(mark.x, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = cssColor(mark.color);
      ctx.setLineDash(mark.isShort ? [] : [3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.globalAlpha = mark.isShort ? 0.9 : 0.55;
      ctx.beginPath();
      ctx.moveTo(x, mark.isShort ? bbox.top + bbox.height - 7 * devicePixelRatio : bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function options(width) {
    const text = cssColor("--muted"), grid = cssColor("--grid");
    const font = '11px system-ui, -apple-system, "Segoe UI", sans-serif';
    const axis = { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    return {
      width, height,
      legend: { show: false },
      padding: [8, 16, 0, 0],
      cursor: {
        sync: { key: group }, drag: { x: true, y: false, setScale: false },
        points: { size: 6 }, focus: { prox: -1 },
      },
      scales: { x: { time: false }, y: { distr: current.isLog ? 3 : 1 } },
      axes: [
        { ...axis, size: 24, gap: 5, space: 64, values: (u, ticks) => ticks.map(xFormat) },
        { ...axis, size: 58, gap: 6, space: 34, 
          values: (u, ticks, axis, space, step) => ticks.map((v) => (v === null ? "" : isBinary ? axisFormat(v, step) : axisFormat(v))),
          ...(isBinary ? { incrs: BINARY_STEPS } : {}) },
      ],
      series: [{}, ...current.series.map((one) => ({
        label: one.label, stroke: cssColor(one.color), width: one.faint ? 1 : 1.75, alpha: one.faint ? 0.38 : 1,
        spanGaps: true, points: { show: Boolean(one.points), size: 5, fill: cssColor(one.color) },
      }))],
      hooks: {
        draw: [drawMarks],
        setCursor: [(u) => { showValues(u.cursor.idx); if (onHover && u.cursor.idx !== null && u.cursor.event) onHover(u.data[0][u.cursor.idx]); }],
        setSelect: [(u) => {
          if (u.select.width > 4 && onZoom) onZoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    };
  }

  function build() {
    plot?.destroy();
    plot = null;
    if (!current || !canvas.clientWidth) return;
    plot = new uPlot(options(canvas.clientWidth), aligned(current.series, current.isLog), canvas);
    if (onZoom) plot.over.addEventListener("dblclick", () => onZoom(null, null));
    showValues(null);
  }

  const sizes = new ResizeObserver(() => {
    if (!plot) build();
    else if (plot.width !== canvas.clientWidth && canvas.clientWidth) plot.setSize({ width: canvas.clientWidth, height });
  });
  sizes.observe(canvas);
  const chart = {
    root,
    rebuild: build,
    // Show new data; the plot is kept where the lines are the same, so that a live update does not flicker.
    update(series, { marks = [], isLog = false } = {}) {
      const shape = (value) => value && JSON.stringify([value.isLog, value.series.map((one) => [one.label, one.color])]);
      const next = { series, marks, isLog };
      const isSame = plot && shape(current) === shape(next);
      current = next;
      if (isSame) {
        plot.setData(aligned(series, isLog));
        showValues(plot.cursor.idx ?? null);
      } else build();
    },
    destroy() {
      sizes.disconnect();
      plot?.destroy();
      openCharts.delete(chart);
    },
  };
  openCharts.add(chart);
  return chart;
}

function aligned(series, isLog) {
  const tables = series.map((one) => [one.x, isLog ? one.y.map((v) => (v > 0 ? v : null)) : one.y]);
  if (!tables.length) return [[], []];
  if (tables.every(([x]) => x === tables[0][0])) return [tables[0][0], ...tables.map(([, y]) => y)];
  return uPlot.join(tables);
}

export function redrawCharts() {
  for (const chart of openCharts) chart.rebuild();
}
