// Runs side by side: overlaid curves, settings that differ, verdicts, last and best metrics.

import { ask, isExport } from "../api.js";
import { lineChart, lineColor } from "../charts.js";
import { card, choice, dataTable, h, replace } from "../dom.js";
import { clock, inUnit, short, whole } from "../format.js";
import { CURVE_CHARTS, CURVE_LABELS, SMOOTHINGS, X_AXES, metricLines } from "./curves.js";

export async function comparePage(root, { query }) {
  document.title = "Compare · Vorox";
  const ids = (query.get("ids") ?? "").split("/").filter(Boolean);
  const runs = (await ask("runs")).runs;
  if (ids.length < 2) return void chooseRuns(root, runs, ids);
  const state = { x: "steps", smoothing: "auto", isLog: false, found: {} };
  const charts = [], wide = h("div", { class: "wide-charts" }), grid = h("div", { class: "charts" }), details = h("div", { class: "page" });
  let shown = "";
  const legend = h("div", { class: "marks" }, ids.map((id, index) => {
    const swatch = h("i", { class: "swatch" });
    swatch.style.background = `var(${lineColor(index)})`;
    return h("a", { href: `#/run/${encodeURIComponent(id)}/curves` }, swatch, id);
  }));
  replace(root, h("div", { class: "bar" }, h("h1", null, "Compare"), h("span", { class: "grow" }), h("a", { class: "button", href: "#/compare" }, "Other runs")),
    card(null, legend), h("div", { class: "bar controls" }, choice("X axis", [["steps", "Step"], ["tokens", "Tokens"], ["seconds", "Time"], ["flops", "FLOPs"]], "steps", (x) => { state.x = x; show(); }),
      !isExport && choice("Smoothing", SMOOTHINGS, "auto", (value) => { state.smoothing = value; refresh(); }),
      choice("Y axis", [[false, "Linear"], [true, "Log"]], false, (isLog) => { state.isLog = isLog; show(); })),
    wide, grid, details);

  function show() {
    for (const definition of CURVE_CHARTS) {
      for (const name of definition.names.slice(0, 2)) {
        const having = ids.filter((id) => state.found[id]?.[name]);
        if (!having.length) continue;
        let known = charts.find((one) => one.name === name);
        if (!known) {
          const title = name === "eval/loss" ? "Validation loss" : definition.hasNames ? `${definition.title}: ${CURVE_LABELS[name] ?? name}` : definition.title;
          known = { name, chart: lineChart({ title, height: definition.isWide ? 280 : 200, xFormat: (x) => X_AXES[state.x](x), yFormat: definition.format,
            axisFormat: definition.axis ?? definition.format, isBinary: definition.isBinary, hasNames: true, group: "compare" }) };
          charts.push(known);
          (definition.isWide ? wide : grid).append(h("section", { class: "card" }, known.chart.root));
        }
        known.chart.update(having.flatMap((id) => metricLines(state.found[id][name], state.x, id, lineColor(ids.indexOf(id)))),
          { isLog: state.isLog && Boolean(definition.isWide) });
      }
    }
  }

  async function refresh() {
    const names = CURVE_CHARTS.flatMap((definition) => definition.names.slice(0, 2)).join(",");
    const found = await Promise.all(ids.map((id) => ask("curves", { id, names, points: 600, smoothing: state.smoothing })));
    ids.forEach((id, index) => { state.found[id] = found[index].metrics; });
    show();
    const compared = await ask("compare", { ids: ids.join("/") });
    const parts = JSON.stringify(compared);
    if (parts === shown) return;
    shown = parts;
    replace(details, compared.others.map((other) => comparison(compared.baseline, other)), recordedVerdicts(ids, compared.verdicts));
  }
  await refresh();
  return { refresh, close: () => charts.forEach(({ chart }) => chart.destroy()) };
}

function comparison(baseline, other) {
  const parity = other.parity;
  const verdicts = [h("p", { class: other.chain.difference || other.chain.num_equal_steps === null ? "verdict" : "verdict good" }, `Replay chains: ${other.chain.verdict}.`),
    parity && h("p", { class: "verdict" }, `Parity: ${parity.engines.join(" and ")} read equal batches in ${whole(parity.equal_batches)} of ${whole(parity.shared_steps)} steps`
      + (parity.largest_loss_gap === null ? "." : `; the losses differ by at most ${short(parity.largest_loss_gap)} (step ${whole(parity.largest_gap_step)}).`))];
  const value = (point, unit) => (point ? `${inUnit(point[1], unit)}` : "–");
  const best = (point, unit) => (point ? `${inUnit(point[1], unit)} @ ${whole(point[0])}` : "–");
  return card(`${baseline} and ${other.id}`, verdicts,
    dataTable([
      { title: "Setting", cell: (row) => h("code", null, row.key), className: "all row-title" },
      { title: baseline, cell: (row) => row.values[0], className: "break" },
      { title: other.id, cell: (row) => row.values[1], className: "break" },
    ], other.settings.differences, { caption: "Settings that differ", stacked: true, empty: other.settings.problem || "All settings are equal." }),
    dataTable([
      { title: "Metric", cell: (row) => h("b", null, row.name), className: "all row-title" },
      { title: `Last, ${baseline}`, number: true, cell: (row) => value(row.last[0], row.unit) },
      { title: `Last, ${other.id}`, number: true, cell: (row) => value(row.last[1], row.unit) },
      { title: `Best, ${baseline}`, number: true, cell: (row) => best(row.best[0], row.unit) },
      { title: `Best, ${other.id}`, number: true, cell: (row) => best(row.best[1], row.unit) },
    ], other.metrics, { caption: "Metrics", stacked: true }));
}

// What vorox replay and vorox parity found about each run.
function recordedVerdicts(ids, verdicts) {
  const without = ids.filter((id) => !verdicts.some((one) => one.id === id));
  return card("Replay and parity of each run",
    dataTable([
      { title: "Run", cell: (one) => h("b", null, one.id), className: "all row-title" },
      { title: "Check", cell: (one) => one.kind },
      { title: "Result", cell: (one) => h("span", { class: one.passed ? "pill valid" : "pill failed" }, one.passed ? "passed" : "differs") },
      { title: "Verdict", cell: (one) => one.text, className: "message all" },
      { title: "Time", cell: (one) => clock(one.time), className: "nowrap" },
    ], verdicts, { caption: "Replay and parity of each run", stacked: true, empty: "No run was checked yet: vorox replay RUN and vorox parity RUN record their verdict in the run." }),
    verdicts.length > 0 && without.length > 0 && h("p", { class: "muted" }, `Not checked: ${without.join(", ")}.`));
}

function chooseRuns(root, runs, given) {
  const note = h("p", { class: "note", role: "alert", hidden: true }, "Choose at least two runs.");
  const boxes = runs.map((run) => h("label", { class: "option" }, h("input", { type: "checkbox", value: run.id, checked: given.includes(run.id) }), run.id));
  const form = h("form", { onsubmit: (event) => {
    event.preventDefault();
    const ids = boxes.map((box) => box.firstChild).filter((box) => box.checked).map((box) => box.value);
    note.hidden = ids.length > 1;
    if (ids.length > 1) location.hash = `#/compare?${new URLSearchParams({ ids: ids.join("/") })}`;
  } }, boxes, note, h("div", { class: "bar" }, h("button", { type: "submit", class: "primary" }, "Compare")));
  replace(root, h("div", { class: "bar" }, h("h1", null, "Compare")), card("Choose two or more runs", form));
}
