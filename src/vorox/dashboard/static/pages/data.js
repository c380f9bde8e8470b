// Mixture, epochs and packing per source; queues; the documents of a step and the steps of a document.

import { ask, isExport } from "../api.js";
import { lineChart, lineColor } from "../charts.js";
import { card, dataTable, h, replace } from "../dom.js";
import { baseName, count, fixed, inUnit, percent, whole } from "../format.js";
import { metricLines } from "./curves.js";

const QUEUE_TITLES = { epoch: "Epoch", data_wait_seconds: "Wait for data per step", queue_depth: "Prefetched batches" };

function sentence(name) {
  const text = name.replace(/^pipeline\//, "").replaceAll(/[_/]/g, " ");
  return text[0].toUpperCase() + text.slice(1);
}

export async function dataPage(root, { run, query }) {
  const mixture = h("div"), queues = h("div", { class: "charts" }), lookup = h("div"), charts = new Map();
  replace(root, mixture, lookup, queues);
  const browser = isExport ? null : documentBrowser(run);
  if (browser) replace(lookup, browser.root);

  async function refresh() {
    const found = await ask("data", { id: run });
    const bar = (source) => {
      const node = h("div", { class: "shares", role: "img", "aria-label": `requested ${percent(source.requested_fraction)}, sampled ${percent(source.sampled_fraction)}` }, h("span"), h("span"));
      node.children[0].style.width = `${source.requested_fraction * 100}%`;
      node.children[1].style.width = `${(source.sampled_fraction ?? 0) * 100}%`;
      return node;
    };
    const sources = dataTable([
      { title: "Source", cell: (one) => h("b", null, one.name), className: "all row-title" },
      { title: "Requested / sampled", cell: bar, className: "wide all" },
      { title: "Requested", number: true, cell: (one) => percent(one.requested_fraction, 2) },
      { title: "Sampled", number: true, cell: (one) => percent(one.sampled_fraction, 2) },
      { title: "Epochs", number: true, cell: (one) => fixed(one.epochs, 2) },
      { title: "Rows sampled", number: true, cell: (one) => whole(one.rows_sampled) },
      { title: "Rows", number: true, cell: (one) => whole(one.rows) + (one.is_complete ? "" : " +") },
      { title: "Packed", number: true, cell: (one) => percent(one.packed_fraction, 2) },
      { title: "Files", number: true, cell: (one) => whole(one.files) },
    ], found.sources, { caption: "Sources", stacked: true });
    const stages = found.stages.length > 1 && dataTable([
      { title: "From step", number: true, cell: (one) => whole(one.step) },
      { title: "Mixture", cell: (one) => Object.entries(one.weights).map(([name, weight]) => `${name} ${percent(weight)}`).join(", ") },
    ], found.stages, { caption: "Stages of the mixture" });
    const growth = found.growth.length > found.sources.length && dataTable([
      { title: "Source", cell: (one) => one.source },
      { title: "From draw", number: true, cell: (one) => whole(one.start_draw) },
      { title: "Pass", number: true, cell: (one) => whole(one.epoch + 1) },
      { title: "Rows", number: true, cell: (one) => count(one.rows) },
      { title: "Units", number: true, cell: (one) => whole(one.units) },
    ], found.growth, { caption: "Growth of the cache" });
    replace(mixture, card("Mixture", sources, stages, growth));
    for (const [index, [name, curve]] of Object.entries(found.curves).entries()) {
      if (!charts.has(name)) {
        const chart = lineChart({ title: QUEUE_TITLES[name] ?? sentence(name), description: curve.description, height: 140,
          xFormat: whole, yFormat: (v) => inUnit(v, curve.unit), group: "data" });
        charts.set(name, chart);
        queues.append(h("section", { class: "card" }, chart.root));
      }
      charts.get(name).update(metricLines(curve, "steps", name, lineColor(index)));
    }
  }
  await refresh();
  if (browser) await browser.showStep(Number(query.get("step")) || 1);
  return { refresh, close: () => charts.forEach((chart) => chart.destroy()) };
}

const STATES = {
  skipped: "The update of this step was not applied.",
  rolled_back: "The attempt that executed this step lost its later steps; no weights hold it.",
  open: "This step is in no checkpoint yet.",
  planned: "This step has not been executed.",
  beyond: "This step is after the end of the run and was never executed.",
};

function documentBrowser(run) {
  const step = h("input", { type: "number", min: 1, "aria-label": "Step" }), list = h("div"), steps = h("div");
  const uri = h("input", { type: "text", placeholder: "file name or end of it", "aria-label": "File" });
  const ordinal = h("input", { type: "number", min: 0, placeholder: "any", "aria-label": "Index of the document in the file" });
  const form = (onSubmit, ...children) => h("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); onSubmit(); } }, ...children);
  const root = h("div", { class: "columns" },
    card(null, form(() => showStep(Number(step.value)), h("h2", null, "Documents of step"), step, h("button", { type: "submit" }, "Show")), list),
    card(null, form(() => showSteps(uri.value, ordinal.value), h("h2", null, "Steps of document"), uri, ordinal, h("button", { type: "submit" }, "Show")), steps));
  replace(steps, h("p", { class: "muted" }, "Choose a document of the list, or type the name of a file."));

  async function showStep(number) {
    step.value = number;
    try {
      const found = await ask("documents", { id: run, step: number });
      replace(list, h("p", { class: "muted" }, `${whole(found.num_documents)} documents in ${whole(found.rows)} rows; ${whole(found.tokens)} tokens, ${whole(found.padding_tokens)} padding.`),
        found.state === "kept" ? null : h("p", { class: "muted" }, STATES[found.state]),
        found.documents.map((one) => h("button", { type: "button", class: "document", title: one.uri, onclick: () => showSteps(one.uri, String(one.ordinal)) },
          h("span", { class: "muted" }, `${one.source} · slot ${one.slot} · ${whole(one.num_tokens)} of ${whole(one.document_tokens)} tokens`), h("b", null, `${baseName(one.uri)} #${whole(one.ordinal)}`),
          h("span", { class: "excerpt" }, one.excerpt))));
    } catch (error) {
      replace(list, h("p", { class: "problem" }, error.message));
    }
  }

  async function showSteps(name, index) {
    if (!name) return;
    uri.value = name;
    ordinal.value = index;
    try {
      const found = await ask("steps", { id: run, uri: name, ordinal: index });
      replace(steps, h("p", { class: "muted" }, `${whole(found.total)} occurrences` + (found.total > found.steps.length ? `; the first ${whole(found.steps.length)}` : "")),
        dataTable([
          { title: "Step", number: true, cell: (one) => h("button", { type: "button", class: "link", onclick: () => showStep(one.step) }, whole(one.step)) },
          { title: "Slot", number: true, cell: (one) => whole(one.slot) },
          { title: "Epoch", number: true, cell: (one) => whole(one.epoch) },
          { title: "State", cell: (one) => one.state.replace("_", " ") },
          { title: "Known to the", cell: (one) => one.granularity },
        ], found.steps, { caption: "Steps of the document", empty: "No step trains on it." }));
    } catch (error) {
      replace(steps, h("p", { class: "problem" }, error.message));
    }
  }
  return { root, showStep };
}
