// What each rank does, where the time goes, memory, stalls with their stacks, and all warnings and errors.

import { ask, isExport } from "../api.js";
import { lineChart, lineColor } from "../charts.js";
import { card, dataTable, h, pill, replace } from "../dom.js";
import { bytes, clock, duration, inUnit, percent, short, whole } from "../format.js";
import { metricLines } from "./curves.js";

const TIME_PARTS = [["time/compute_fraction", "compute"], ["time/data_fraction", "data"], ["time/save_fraction", "save"], ["time/eval_fraction", "eval"]];
const MEMORY_PARTS = [["memory/device_bytes", "device"], ["memory/device_reserved_bytes", "reserved"], ["memory/host_bytes", "host"]];
const ACTIVITIES = [["compute", "compute", "--line-1"], ["wait", "wait for other ranks", "--line-5"], ["data", "data", "--line-2"],
  ["save", "save", "--line-3"], ["eval", "eval", "--line-4"], ["start", "start, compile", "--muted"], ["dead", "killed", "--bad"]];
const ACTIVITY_NAMES = Object.fromEntries(ACTIVITIES.map(([key, label]) => [key, label]));
const ACTIVITY_COLORS = Object.fromEntries(ACTIVITIES.map(([key, , color]) => [key, color]));
const ACTIVITY_MILLISECONDS = 1000, IDLE_SECONDS = 10;
const SINGLE_PARTS = [["step_seconds", "Step time", duration], ["data_wait_seconds", "Wait for data", duration], ["queue_depth", "Prefetched batches", short],
  ["seconds_since_save", "Age of the last save", duration], ["mirror/age_seconds", "Age of the mirror", duration]];

export async function healthPage(root, { run }) {
  const ranks = h("div"), stalls = h("div", { class: "page" }), parts = h("div"), charts = h("div", { class: "charts" }), tables = h("div", { class: "page" }), open = new Map();
  replace(root, ranks, stalls, parts, charts, tables);
  let timer = null, hasRanks = false;

  function draw(title, curves, lines, format) {
    const found = lines.filter(([name]) => curves[name]);
    if (!found.length) return;
    if (!open.has(title)) {
      const chart = lineChart({ title, height: 150, xFormat: whole, yFormat: format, isBinary: format === bytes, group: "health" });
      open.set(title, chart);
      charts.append(h("section", { class: "card" }, chart.root));
    }
    open.get(title).update(found.flatMap(([name, label], index) => metricLines(curves[name], "steps", label, lineColor(index))));
  }

  function timeBar(curves) {
    const average = TIME_PARTS.map(([name, label], index) => {
      const values = (curves[name]?.values ?? []).filter((value) => value !== null);
      return { label, color: lineColor(index), share: values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0 };
    });
    const bar = h("div", { class: "stack", role: "img", "aria-label": average.map((one) => `${one.label} ${percent(one.share)}`).join(", ") },
      average.map((one) => { const node = h("span"); node.style.width = `${one.share * 100}%`; node.style.background = `var(${one.color})`; return node; }));
    const legend = h("div", { class: "marks" }, average.map((one) => {
      const swatch = h("i", { class: "swatch" });
      swatch.style.background = `var(${one.color})`;
      return h("span", null, swatch, one.label, h("b", null, percent(one.share)));
    }));
    return [bar, legend];
  }

  function showRanks({ ranks: found, slowest, seconds }) {
    hasRanks = found.length > 0;
    if (!hasRanks) return void replace(ranks);
    const swatch = (color) => { const node = h("i", { class: "swatch" }); node.style.background = `var(${color})`; return node; };
    const seen = new Set(found.flatMap((one) => one.history));
    replace(ranks, card("Ranks now",
      h("div", { class: "ranks", role: "list", "aria-label": "Ranks now" }, found.map((one) => rankRow(one, slowest, seconds))),
      h("div", { class: "marks" }, ACTIVITIES.filter(([key]) => seen.has(key)).map(([, label, color]) => h("span", null, swatch(color), label)),
        h("span", { class: "grow" }), h("span", null, `the last ${duration(seconds)}, now on the right`))));
  }

  async function poll() {
    try { if (!document.hidden) showRanks(await ask("ranks", { id: run })); } catch { /* the next poll tries again */ }
    timer = setTimeout(poll, hasRanks ? ACTIVITY_MILLISECONDS : 5 * ACTIVITY_MILLISECONDS);
  }

  async function refresh() {
    const found = await ask("health", { id: run });
    showRanks(found.activity);
    replace(stalls, found.stalls.map((one) => card(`Stall of attempt ${whole(one.attempt)}`,
      h("p", null, h("span", { class: "muted nowrap" }, clock(one.at)), " ", one.what),
      h("details", null, h("summary", null, "Stacks of all ranks"), h("pre", { class: "trace", tabindex: 0 }, one.traceback || "No stacks were written.")))));
    const skipped = found.nonfinite.length ? h("p", { class: "problem" }, `Records of non-finite steps: ${found.nonfinite.join(", ")}`) : null;
    replace(parts, card("Time", timeBar(found.curves), skipped));
    draw("Parts of the time", found.curves, TIME_PARTS, (v) => percent(v, 0));
    draw("Memory", found.curves, MEMORY_PARTS, bytes);
    for (const [name, title, format] of SINGLE_PARTS) draw(title, found.curves, [[name, title]], format);
    replace(tables,
      card("Events by rank", dataTable([
        { title: "Rank", number: true, cell: (one) => whole(one.rank) },
        { title: "Last event", cell: (one) => clock(one.last_time), className: "nowrap" },
        { title: "Message", cell: (one) => one.last_message, className: "message all" },
        { title: "Warnings", number: true, cell: (one) => whole(one.warnings) },
        { title: "Errors", number: true, cell: (one) => whole(one.errors) },
      ], found.ranks, { caption: "Events by rank", empty: "No rank has reported yet.", stacked: true })),
      card("Warnings and errors", dataTable([
        { title: "Time", cell: (one) => clock(one.time), className: "nowrap" },
        { title: "Level", cell: (one) => pill(one.level) },
        { title: "Rank", number: true, cell: (one) => inUnit(one.rank, "") },
        { title: "Message", cell: (one) => (one.trace ? h("details", null, h("summary", null, one.message), h("pre", null, one.trace)) : one.message), className: "message all" },
      ], [...found.problems].reverse(), { caption: "Warnings and errors", empty: "None: no warning and no error was recorded.", stacked: true })));
  }
  await refresh();
  if (!isExport) timer = setTimeout(poll, ACTIVITY_MILLISECONDS);
  return { refresh, close: () => { clearTimeout(timer); open.forEach((chart) => chart.destroy()); } };
}

// One rank: what it did at every reading as a strip, and what it does now.
function rankRow(one, slowest, seconds) {
  const strip = h("span", { class: "strip", role: "img", "aria-label": `${ACTIVITY_NAMES[one.activity] ?? one.activity} now` });
  const cells = [...Array(Math.max(0, seconds - one.history.length)).fill(null), ...one.history];
  for (let at = 0; at < cells.length;) {
    let end = at;
    while (end < cells.length && cells[end] === cells[at]) end += 1;
    const part = h("i", null);
    part.style.flexGrow = end - at;
    part.style.background = cells[at] ? `var(${ACTIVITY_COLORS[cells[at]] ?? "--muted"})` : "transparent";
    strip.append(part);
    at = end;
  }
  const isIdle = one.idle_seconds >= IDLE_SECONDS && one.condition !== "dead";
  const notes = [one.condition === "stopped" && "stopped (SIGSTOP)", one.is_waiting_for_store && "a store does not answer",
    one.rank === slowest && "slowest", isIdle && `no progress for ${duration(one.idle_seconds)}`].filter(Boolean);
  return h("div", { class: "rank", role: "listitem" },
    h("b", null, `Rank ${whole(one.rank)}`), strip,
    h("span", { class: "nowrap" }, `step ${whole(one.step)} · ${ACTIVITY_NAMES[one.activity] ?? one.activity}`),
    h("span", { class: isIdle || one.condition === "dead" ? "problem" : "muted" }, [...notes, `queue ${whole(one.queue_depth)}`, one.host].join(" · ")));
}
