// The resolved settings of a run, and its attempts.

import { ask } from "../api.js";
import { card, command, dataTable, h, pill, replace } from "../dom.js";
import { clock, whole } from "../format.js";

function flatSettings(value, prefix = "") {
  if (value === null || typeof value !== "object") return [[prefix, value]];
  const entries = Object.entries(value);
  if (!entries.length) return [[prefix, Array.isArray(value) ? "[]" : "{}"]];
  return entries.flatMap(([key, inner]) => flatSettings(inner, prefix ? `${prefix}.${key}` : key));
}

export async function settingsPage(root, { run }) {
  const found = await ask("run", { id: run });
  const settings = found.config ? flatSettings(found.config) : [];
  const changed = new Set(found.changed ?? []);
  const isChanged = (key) => changed.has(key) || [...changed].some((one) => key.startsWith(`${one}.`));
  const only = h("input", { type: "checkbox", checked: changed.size > 0, onchange: show });
  const list = h("div"), filter = h("input", { type: "search", placeholder: "Filter settings", "aria-label": "Filter settings", oninput: show });
  function show() {
    const wanted = filter.value.toLowerCase();
    const rows = settings.filter(([key, value]) => `${key}=${value}`.toLowerCase().includes(wanted) && (!only.checked || (isChanged(key) && value !== null && value !== "[]" && value !== "{}")));
    const sections = Map.groupBy ? Map.groupBy(rows, ([key]) => key.split(".")[0]) : new Map([["", rows]]);
    const table = (title, shown) => dataTable([
      { title: "Setting", cell: ([key]) => h("code", null, key) },
      { title: "Value", cell: ([, value]) => (value === null ? h("span", { class: "muted" }, "null") : String(value)), className: "break" },
    ], shown, { caption: title || "Settings" });
    replace(list, rows.length ? [...sections].map(([title, shown]) =>
      h("details", { open: true, class: "section" }, h("summary", null, `${title || "Settings"} (${whole(shown.length)})`), table(title, shown)))
      : h("p", { class: "note" }, found.config_problem || "No setting matches."));
  }
  show();
  replace(root,
    card("Attempts", dataTable([
      { title: "Attempt", number: true, cell: (one) => whole(one.attempt) },
      { title: "Started", cell: (one) => clock(one.started_at), className: "nowrap" },
      { title: "Ended", cell: (one) => clock(one.ended_at), className: "nowrap" },
      { title: "Outcome", cell: (one) => pill(one.outcome) },
      { title: "Command", cell: (one) => command((one.argv ?? []).join(" ")), className: "all" },
    ], found.attempts, { caption: "Attempts", stacked: true })),
    card(null, h("div", { class: "bar" }, h("h2", null, "Settings"), h("span", { class: "grow" }),
      h("label", { class: "option" }, only, "Changed only"), filter), list));
  return {};
}
