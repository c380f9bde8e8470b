// The curves of a run, with events, zoom, and the documents of the step under the cursor.

import { ask, isExport } from "../api.js";
import { lineChart, lineColor } from "../charts.js";
import { choice, h, replace } from "../dom.js";
import { baseName, bytes, count, duration, fixed, inUnit, percent, short, whole } from "../format.js";

export const CURVE_CHARTS = [
  { title: "Loss", names: ["loss", "eval/loss"], height: 300, format: (v) => fixed(v, v < 10 ? 3 : 2), axis: short, isWide: true },
  { title: "Learning rate", names: ["learning_rate"], format: short },
  { title: "Gradient norm", names: ["grad_norm"], format: short },
  { title: "Throughput", names: ["tokens_per_second"], format: count },
  { title: "Utilization", names: ["mfu_fraction", "matmul_peak_fraction"], format: (v) => percent(v, 0), hasNames: true },
  { title: "Memory", names: ["memory/device_peak_bytes", "memory/device_bytes", "memory/host_bytes"], format: bytes, hasNames: true, isBinary: true },
  { title: "Bits per byte", names: ["eval/bits_per_byte"], format: (v) => fixed(v, 3), axis: short },
];
export const CURVE_LABELS = {
  loss: "train", "eval/loss": "validation", mfu_fraction: "MFU", matmul_peak_fraction: "of measured matmul peak",
  "memory/device_peak_bytes": "device, peak", "memory/device_bytes": "device", "memory/host_bytes": "host",
};
const MARK_COLORS = {
  save: "--mark-save", validation: "--mark-save", end: "--mark-save", resume: "--mark-resume",
  "non-finite step": "--mark-bad", "loss spike": "--mark-bad", rollback: "--mark-bad", "mixture change": "--mark-data",
  "row length change": "--mark-data", growth: "--mark-data", "settings change": "--mark-settings",
};
const SHORT_MARKS = ["save", "validation", "end"];
export const X_AXES = { steps: whole, tokens: count, seconds: duration, flops: count };
export const SMOOTHINGS = [["auto", "Auto"], ["0", "Off"], ["600", "0.6"], ["900", "0.9"], ["980", "0.98"]];
const HOVER_MILLISECONDS = 150;

// Lines of one metric: raw (faint) and smoothed, or the values alone.
export function metricLines(curve, xName, label, color) {
  const x = curve[xName];
  if (!curve.smooth) return [{ label, color, x, y: curve.values, points: x.length < 40 }];
  return [{ label, color, x, y: curve.values, faint: true }, { label: `${label}, smoothed`, color, x, y: curve.smooth }];
}

export async function curvesPage(root, { run }) {
  const state = { x: "steps", smoothing: "auto", isLog: false, from: null, to: null, curves: {}, marks: [] };
  const charts = [], others = h("div", { class: "charts" }), more = h("details", { class: "more" });
  const reset = h("button", { type: "button", hidden: true, onclick: () => zoom(null, null) }, "Reset zoom");
  const marks = h("div", { class: "marks" });
  const documents = documentsPanel(run), sampleNote = h("span", { class: "muted", role: "status", hidden: true }, "Reading all points ...");
  let retry = null, isClosed = false;
  const controls = h("div", { class: "bar controls" },
    choice("X axis", [["steps", "Step"], ["tokens", "Tokens"], ["seconds", "Time"], ["flops", "FLOPs"]], "steps", (x) => { state.x = x; show(); }),
    !isExport && choice("Smoothing", SMOOTHINGS, "auto", (value) => { state.smoothing = value; refresh(); }),
    choice("Y axis", [[false, "Linear"], [true, "Log"]], false, (isLog) => { state.isLog = isLog; show(); }), reset, sampleNote);
  const wide = h("div");
  replace(root, controls, wide, documents.root, others, more);

  function zoom(low, high) {
    const loss = state.curves.loss ?? Object.values(state.curves)[0];
    if (low === null || !loss) [state.from, state.to] = [null, null];
    else {
      const at = (value) => loss.steps[Math.min(loss.steps.length - 1, Math.max(0, loss[state.x].findIndex((x) => x >= value)))];
      const last = loss[state.x].findLastIndex((x) => x !== null && x <= high);
      [state.from, state.to] = [at(low), loss.steps[Math.max(0, last)]];
      if (state.to <= state.from) [state.from, state.to] = [null, null];
    }
    reset.hidden = state.from === null;
    refresh();
  }

  function chartOf(definition, place) {
    const known = charts.find(({ title }) => title === definition.title);
    if (known) return known.chart;
    const curve = state.curves[definition.names[0]];
    const chart = lineChart({
      title: definition.title, unit: unitOf(definition), description: curve?.description, height: definition.height ?? 160,
      xFormat: (x) => X_AXES[state.x](x), yFormat: definition.format, axisFormat: definition.axis ?? definition.format,
      isBinary: definition.isBinary, hasNames: definition.hasNames, onZoom: isExport ? null : zoom,
      onHover: (x) => documents.hover(stepAt(x)),
    });
    charts.push({ title: definition.title, chart });
    place.append(h("section", { class: "card" }, chart.root, definition.isWide && marks));
    return chart;
  }

  function unitOf(definition) {
    const unit = state.curves[definition.names.find((name) => state.curves[name])]?.unit;
    return unit && !["1", "fraction", "bytes"].includes(unit) ? unit : "";
  }

  function stepAt(x) {
    const loss = state.curves.loss;
    if (!loss) return null;
    const at = loss[state.x].findIndex((value) => value >= x);
    return at < 0 ? null : loss.steps[at];
  }

  function eventMarks() {
    const axis = state.curves.loss;
    if (!axis) return [];
    return state.marks.flatMap(({ step, label }) => {
      let at = axis.steps.findIndex((one) => one >= step);
      if (at < 0 && axis.steps.length && label === "end") at = axis.steps.length - 1;
      if (at < 0 || axis[state.x][at] === null) return [];
      return [{ x: axis[state.x][at], color: MARK_COLORS[label] ?? "--muted", label, isShort: SHORT_MARKS.includes(label) }];
    });
  }

  function show() {
    const at = eventMarks();
    for (const definition of CURVE_CHARTS) {
      const names = definition.names.filter((name) => state.curves[name]);
      if (!names.length) continue;
      const chart = chartOf(definition, definition.isWide ? wide : others);
      const lines = names.flatMap((name, index) =>
        metricLines(state.curves[name], state.x, CURVE_LABELS[name] ?? definition.title, lineColor(index)));
      chart.update(lines, { marks: at, isLog: state.isLog && definition.isWide });
    }
    const kinds = [...new Map(at.map((mark) => [mark.label, mark])).values()];
    replace(marks, kinds.map((mark) => {
      const swatch = h("i", { class: mark.isShort ? "tick" : "dash" });
      swatch.style.borderColor = `var(${mark.color})`;
      return h("span", null, swatch, mark.label);
    }));
    showMore();
  }

  function showMore() {
    if (more.childElementCount) return;
    const shown = new Set(CURVE_CHARTS.flatMap((definition) => definition.names));
    const names = state.names.filter((name) => !shown.has(name) && !name.startsWith("activation/") && !name.startsWith("time/"));
    if (!names.length) return;
    const grid = h("div", { class: "charts" });
    const close = () => {
      if (!more.open || grid.childElementCount) return;
      refresh();
    };
    more.append(h("summary", null, `All metrics (${names.length} more)`), grid);
    more.addEventListener("toggle", close);
    state.more = { names, grid };
  }

  function showExtra() {
    if (!state.more || !more.open) return;
    for (const name of state.more.names.filter((one) => state.curves[one])) {
      const chart = chartOf({ title: name, names: [name], format: (v) => inUnit(v, state.curves[name].unit) }, state.more.grid);
      chart.update(metricLines(state.curves[name], state.x, name, "--line-1"));
    }
  }

  async function refresh() {
    const names = [...CURVE_CHARTS.flatMap((definition) => definition.names), ...(more.open ? state.more.names : [])];
    const query = { id: run, preview: 1, names: names.join(","), smoothing: state.smoothing, from: state.from, to: state.to,
                    points: Math.max(400, Math.min(2000, Math.round(root.clientWidth * 1.2))) };
    const [found, events] = await Promise.all([ask("curves", query), ask("events", { id: run })]);
    state.curves = found.metrics;
    state.names = found.names;
    state.marks = events.marks;
    sampleNote.hidden = !found.is_sample;
    clearTimeout(retry);
    if (found.is_sample && !isClosed) retry = setTimeout(refresh, 1000);
    if (!Object.keys(state.curves).length) return void replace(wide, h("p", { class: "note" }, "No metrics yet."));
    if (!charts.length) replace(wide);
    show();
    showExtra();
  }

  await refresh();
  documents.start(state.curves.loss?.steps.at(-1));
  return { refresh, close: () => { isClosed = true; clearTimeout(retry); documents.close(); charts.forEach(({ chart }) => chart.destroy()); } };
}

// The documents behind a step: of the step under the cursor, or of one that is typed.
function documentsPanel(run) {
  const list = h("div", { class: "documents", "aria-live": "polite" }), input = h("input", { type: "number", min: 1, "aria-label": "Step",
    onchange: () => load(Number(input.value)) });
  const root = h("section", { class: "card" },
    h("div", { class: "bar" }, h("h2", null, "Documents of step"), input, h("span", { class: "muted" }, "Hover a curve, or type a step.")), list);
  const answers = new Map();
  let timer = null, wanted = null;

  async function load(step) {
    if (!Number.isInteger(step) || step < 1) return;
    wanted = step;
    try {
      if (!answers.has(step)) answers.set(step, await ask("documents", { id: run, step }));
      if (wanted !== step) return;
      const found = answers.get(step);
      if (document.activeElement !== input) input.value = step;
      replace(list, found.documents.slice(0, 6).map((one) => h("div", { class: "document" },
        h("span", { class: "muted" }, one.source), h("b", { title: one.uri }, `${baseName(one.uri)} #${whole(one.ordinal)}`),
        h("span", { class: "excerpt" }, one.excerpt))),
      h("p", { class: "muted" }, `${whole(found.num_documents)} documents in ${whole(found.rows)} rows, ${whole(found.tokens)} tokens. `,
        h("a", { href: `#/run/${encodeURIComponent(run)}/data?step=${step}` }, "All of them")));
    } catch (error) {
      if (wanted === step) replace(list, h("p", { class: "muted" }, error.message));
    }
  }
  if (isExport) root.hidden = true;
  return {
    root,
    start: (step) => { if (!isExport && step) load(step); },
    hover(step) {
      if (isExport || step === null || step === wanted) return;
      clearTimeout(timer);
      timer = setTimeout(() => load(step), HOVER_MILLISECONDS);
    },
    close: () => clearTimeout(timer),
  };
}
