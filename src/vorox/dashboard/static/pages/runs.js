// All runs: filter, sort, compare.

import { ask, isExport } from "../api.js";
import { h, pill, replace, sparkline } from "../dom.js";
import { DASH, ago, count, duration, fixed, whole } from "../format.js";

// Columns: [key, title, is a number, the best is the lowest].
const RUN_COLUMNS = [
  ["id", "Run"], ["state", "State"], ["step", "Step", true], ["loss", "Loss", true, true], ["eval_loss", "Validation", true, true],
  [null, "Loss curve"], ["settings", "Settings"], ["tokens_per_second", "Tokens/s", true], ["eta_seconds", "ETA", true],
  ["hardware", "Hardware"], ["commit", "Git"], ["changed_at", "Changed", true],
];
const SAME_IS_HIDDEN = ["settings", "hardware", "commit"];
const MAX_SETTINGS = 4;

// The settings on the command lines of some runs that are not the same in all of them, as those of a sweep.
function variedSettings(runs) {
  const keys = new Set(runs.flatMap((run) => Object.keys(run.settings)));
  return [...keys].filter((key) => new Set(runs.map((run) => run.settings[key])).size > 1).slice(0, MAX_SETTINGS);
}

function differ(runs, key) {
  return new Set(runs.map((run) => run[key])).size > 1;
}

// Numbers sort as numbers.
function sortable(text) {
  return text && Number.isFinite(Number(text)) ? Number(text) : text;
}

export async function runsPage(root) {
  document.title = "Runs · Vorox";
  const chosen = new Set(), shownRows = new Map();
  const state = { filter: "", key: "created_at", isDescending: true, runs: [], varied: [] };
  const filter = h("input", { type: "search", placeholder: "Filter: name, state, hardware, branch", "aria-label": "Filter runs",
    oninput: () => { state.filter = filter.value.toLowerCase(); show(); } });
  const compareLink = h("a", { class: "button", hidden: true }, "Compare");
  const total = h("span", { class: "muted" }), body = h("tbody"), heads = [];
  const empty = h("p", { class: "note", hidden: true });
  for (const [key, title, isNumber] of RUN_COLUMNS) {
    const button = key ? h("button", { type: "button", onclick: () => sortBy(key) }, title) : title;
    heads.push(h("th", { scope: "col", class: isNumber ? "number" : null }, button));
  }
  replace(root,
    h("div", { class: "bar" }, h("h1", null, "Runs"), total, h("span", { class: "grow" }), compareLink, filter),
    h("div", { class: "scroll runs" }, h("table", null,
      h("thead", null, h("tr", null, h("th", { scope: "col" }, h("span", { class: "hidden" }, "Compare")), heads)), body)), empty);

  function sortBy(key) {
    const isLowBest = RUN_COLUMNS.find(([one]) => one === key)[3];
    state.isDescending = state.key === key ? !state.isDescending : key !== "id" && key !== "settings" && !isLowBest;
    state.key = key;
    show();
  }

  function cells(run) {
    const done = run.total_steps ? Math.min(1, run.step / run.total_steps) : 0;
    const bar = h("span", { class: "progress" }, h("span"));
    bar.firstChild.style.width = `${done * 100}%`;
    return [
      pill(run.state),
      [h("span", { class: "nowrap" }, whole(run.step), h("span", { class: "muted" }, ` / ${run.total_steps ? whole(run.total_steps) : DASH}`)), bar],
      fixed(run.loss), fixed(run.eval_loss, 4), sparkline(run.sparkline, `Loss of ${run.id}`),
      state.varied.filter((key) => key in run.settings).map((key) => h("small", null, `${key.split(".").at(-1)} ${run.settings[key]}`)),
      run.tokens_per_second >= 1e6 ? count(run.tokens_per_second) : whole(run.tokens_per_second),
      run.state === "running" ? duration(run.eta_seconds) : DASH,
      [h("span", null, run.hardware || DASH), run.engine && h("small", null, run.engine)],
      run.commit ? [h("code", { class: "nowrap" }, run.commit.slice(0, 7)), run.is_dirty && h("small", { title: "uncommitted changes" }, "changed")] : DASH,
      ago(run.changed_at),
    ];
  }

  function rowOf(run) {
    let known = shownRows.get(run.id);
    if (!known) {
      const box = h("input", { type: "checkbox", "aria-label": `Compare ${run.id}`, onchange: () => {
        box.checked ? chosen.add(run.id) : chosen.delete(run.id);
        showChosen();
      } });
      const link = h("a", { href: `#/run/${encodeURIComponent(run.id)}/curves` }, run.id);
      const failure = h("small", { class: "failure" });
      const rest = RUN_COLUMNS.slice(1).map(([, title, isNumber]) =>
        h("td", { class: isNumber ? "number" : null, "data-label": title }));
      known = { row: h("tr", null, h("td", { class: "box" }, box), h("td", { class: "name" }, link, failure), rest), rest, failure };
      shownRows.set(run.id, known);
    }
    const text = JSON.stringify([run, state.varied]);
    if (known.text !== text || run.state === "running") {
      known.text = text;
      cells(run).forEach((cell, index) => replace(known.rest[index], [cell].flat()));
      known.failure.textContent = run.failure ?? "";
    }
    return known.row;
  }

  function showChosen() {
    compareLink.hidden = chosen.size < 2 || isExport;
    compareLink.textContent = `Compare ${chosen.size} runs`;
    compareLink.href = `#/compare?${new URLSearchParams({ ids: [...chosen].join("/") })}`;
  }

  function show() {
    const words = state.filter.split(/\s+/).filter(Boolean);
    const text = (run) => [run.id, run.state, run.hardware, run.engine, run.commit, run.branch, Object.entries(run.settings).map(([key, value]) => `${key}=${value}`).join(" ")].join(" ").toLowerCase();
    const found = state.runs.filter((run) => words.every((word) => text(run).includes(word)));
    const missing = state.isDescending ? -Infinity : Infinity;  // at the end
    const value = (run) => (state.key === "settings" ? sortable(run.settings[state.varied[0]]) : run[state.key]) ?? missing;
    state.varied = variedSettings(found);
    found.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (state.isDescending ? -1 : 1));
    const rows = found.map(rowOf);
    if (rows.length !== body.children.length || rows.some((row, index) => row !== body.children[index])) replace(body, rows);
    total.textContent = found.length === state.runs.length ? String(found.length) : `${found.length} of ${state.runs.length}`;
    empty.hidden = found.length > 0;
    empty.textContent = state.runs.length ? "No run matches the filter." : "No runs yet. Start one with: vorox train quickstart";
    const isVaried = { settings: state.varied.length > 0, hardware: differ(found, "hardware"), commit: differ(found, "commit") };
    for (const [index, [key]] of RUN_COLUMNS.entries()) {
      const isHidden = SAME_IS_HIDDEN.includes(key) && !isVaried[key];
      heads[index].hidden = isHidden;
      if (index > 0) for (const run of found) shownRows.get(run.id).rest[index - 1].hidden = isHidden;
    }
    RUN_COLUMNS.forEach(([key], index) => heads[index].setAttribute("aria-sort",
      key !== null && key === state.key ? (state.isDescending ? "descending" : "ascending") : "none"));
  }

  async function refresh() {
    state.runs = (await ask("runs")).runs;
    show();
  }
  await refresh();
  showChosen();
  return { refresh };
}
