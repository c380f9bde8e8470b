// What each rank reported last, where the time goes, memory, and all warnings and errors.

import { ask } from "../api.js";
import { lineChart, lineColor } from "../charts.js";
import { card, dataTable, h, pill, replace } from "../dom.js";
import { bytes, clock, duration, inUnit, percent, short, whole } from "../format.js";
import { metricLines } from "./curves.js";

const TIME_PARTS = [["time/compute_fraction", "compute"], ["time/data_fraction", "data"], ["time/save_fraction", "save"], ["time/eval_fraction", "eval"]];
const MEMORY_PARTS = [["memory/device_bytes", "device"], ["memory/device_reserved_bytes", "reserved"], ["memory/host_bytes", "host"]];
const SINGLE_PARTS = [["step_seconds", "Step time", duration], ["data_wait_seconds", "Wait for data", duration], ["queue_depth", "Prefetched batches", short],
  ["seconds_since_save", "Age of the last save", duration], ["mirror/age_seconds", "Age of the mirror", duration]];

export async function healthPage(root, { run }) {
  const parts = h("div"), charts = h("div", { class: "charts" }), tables = h("div", { class: "page" }), open = new Map();
  replace(root, parts, charts, tables);

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

  async function refresh() {
    const found = await ask("health", { id: run });
    const skipped = found.nonfinite.length ? h("p", { class: "problem" }, `Records of non-finite steps: ${found.nonfinite.join(", ")}`) : null;
    replace(parts, card("Time", timeBar(found.curves), skipped));
    draw("Parts of the time", found.curves, TIME_PARTS, (v) => percent(v, 0));
    draw("Memory", found.curves, MEMORY_PARTS, bytes);
    for (const [name, title, format] of SINGLE_PARTS) draw(title, found.curves, [[name, title]], format);
    replace(tables,
      card("Ranks", dataTable([
        { title: "Rank", number: true, cell: (one) => whole(one.rank) },
        { title: "Last event", cell: (one) => clock(one.last_time), className: "nowrap" },
        { title: "Message", cell: (one) => one.last_message },
        { title: "Warnings", number: true, cell: (one) => whole(one.warnings) },
        { title: "Errors", number: true, cell: (one) => whole(one.errors) },
      ], found.ranks, { caption: "Ranks", empty: "No rank has reported yet." })),
      card("Warnings and errors", dataTable([
        { title: "Time", cell: (one) => clock(one.time), className: "nowrap" },
        { title: "Level", cell: (one) => pill(one.level) },
        { title: "Rank", number: true, cell: (one) => inUnit(one.rank, "") },
        { title: "Message", cell: (one) => (one.trace ? h("details", null, h("summary", null, one.message), h("pre", null, one.trace)) : one.message) },
      ], [...found.problems].reverse(), { caption: "Warnings and errors", empty: "None: no warning and no error was recorded." })));
  }
  await refresh();
  return { refresh, close: () => open.forEach((chart) => chart.destroy()) };
}
