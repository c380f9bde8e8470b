// What can be computed again and was: steps to explain, the parent of a fork, statements, and where the time went.

import { ask } from "../api.js";
import { lineColor } from "../charts.js";
import { card, command, dataTable, h, replace } from "../dom.js";
import { DASH, duration, percent, whole } from "../format.js";

const KEY_CHARACTERS = 16;

export async function reExecutionPage(root, { run }) {
  async function refresh() {
    const found = await ask("re_execution", { id: run });
    replace(root, timeCard(found), found.fork && forkCard(found.fork), stepsCard(found.steps), statementsCard(found.statements));
  }
  await refresh();
  return { refresh };
}

function timeCard({ time, time_command: text }) {
  if (time.problem) return card("Where the time went", h("p", { class: "problem" }, time.problem));
  const parts = time.classes.map((one, index) => ({ ...one, color: lineColor(index), share: one.seconds / (time.wall_seconds || 1) }));
  const bar = h("div", { class: "stack", role: "img", "aria-label": parts.map((one) => `${one.name} ${percent(one.share)}`).join(", ") },
    parts.map((one) => { const node = h("span"); node.style.width = `${one.share * 100}%`; node.style.background = `var(${one.color})`; return node; }));
  const legend = h("div", { class: "marks" }, parts.map((one) => {
    const swatch = h("i", { class: "swatch" });
    swatch.style.background = `var(${one.color})`;
    return h("span", null, swatch, `${one.name} `, h("b", null, duration(one.seconds)));
  }));
  const goodput = time.goodput_fraction === null ? DASH : percent(time.goodput_fraction);
  return card("Where the time went", h("p", null, `${duration(time.wall_seconds)} in all, goodput ${goodput}`), bar, legend,
    time.notes.map((note) => h("p", { class: "note" }, note)), command(text));
}

function forkCard(fork) {
  const parent = fork.id === null ? fork.parent : h("a", { href: `#/run/${encodeURIComponent(fork.id)}/re_execution` }, fork.parent);
  return card("Fork", h("p", null, "Of ", parent, ` at step ${whole(fork.step)}: `, fork.changes.join(", ") || "nothing is changed"),
    fork.command && command(fork.command));
}

function stepsCard(steps) {
  return card("Steps to explain", dataTable([
    { title: "Step", number: true, cell: (one) => whole(one.step) },
    { title: "What", cell: (one) => one.what, className: "nowrap" },
    { title: "Which document did it?", cell: (one) => command(one.command), className: "all" },
  ], steps, { caption: "Steps to explain", empty: "No step was a loss spike, or not finite.", stacked: true }));
}

function statementsCard(statements) {
  const signed = (one) => (one.key_ids.length ? `by key ${one.key_ids.map((key) => key.slice(0, KEY_CHARACTERS)).join(", ")}; verify it with the signer's public key` : "no");
  const current = (one) => (one.is_current === null ? "unknown" : one.is_current ? "yes" : h("span", { class: "problem" }, "no: the run has changed"));
  return card("Statements", dataTable([
    { title: "File", cell: (one) => one.name, className: "all" },
    { title: "States", cell: (one) => (one.problem ? h("span", { class: "problem" }, one.problem) : one.text), className: "message all" },
    { title: "About this run as it is", cell: current },
    { title: "Signed", cell: signed, className: "all" },
  ], statements, { caption: "Statements", empty: "None: vorox unlearn writes one, and an audit with --output.", stacked: true }));
}
