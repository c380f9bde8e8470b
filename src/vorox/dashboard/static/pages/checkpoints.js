// The checkpoints of a run, their verification, and the commands that use them.

import { ask, isExport, post } from "../api.js";
import { card, command, dataTable, h, pill, replace } from "../dom.js";
import { ago, bytes, fixed, whole } from "../format.js";

export async function checkpointsPage(root, { run }) {
  const table = h("div"), commands = h("div"), verified = new Map();
  let shown = null;  // the checkpoint that was chosen; without a choice, the newest
  replace(root, table, commands);

  function verifyButton(entry) {
    if (isExport || entry.state === "quarantined") return null;
    const button = h("button", { type: "button", onclick: async () => {
      button.disabled = true;
      button.textContent = "Reading ...";
      try { verified.set(entry.name, await post("verify", { id: run, name: entry.name })); }
      catch (error) { verified.set(entry.name, { state: "unreadable", problem: error.message }); }
      await refresh();
    } }, "Verify");
    return button;
  }

  function showCommands(found, entry) {
    const earlier = found.checkpoints.filter((one) => one.step < entry.step && one.state !== "quarantined").at(-1)?.step ?? 0;
    const at = (text) => text.replace("STEP", String(entry.step));
    const key = `${entry.name} ${earlier} ${entry.resume}`;
    if (key === commands.dataset.key) return;  // a text that is being selected stays
    commands.dataset.key = key;
    replace(commands, card(`Commands for step ${whole(entry.step)}`, h("dl", { class: "commands" },
      [["Resume", `vorox train --resume ${entry.resume}`], ["Generate", at(found.commands.generate) + " -p 'Once upon a time'"],
       ["Export", at(found.commands.export)], ["Verify", at(found.commands.verify)],
       ["Replay", `vorox replay ${found.argument} --from ${earlier} --to ${entry.step}`]]
        .map(([name, text]) => [h("dt", null, name), h("dd", null, command(text))]))));
  }

  async function refresh() {
    const found = await ask("checkpoints", { id: run });
    const rows = found.checkpoints.map((entry) => ({ ...entry, ...verified.get(entry.name) })).reverse();
    const best = Math.min(...rows.map((entry) => entry.eval_loss ?? Infinity));
    const rules = Object.entries(found.rules).filter(([key, value]) => value !== null && (key.startsWith("keep") || key.startsWith("every")));
    replace(table, card("Checkpoints", dataTable([
      { title: "Step", number: true, cell: (one) => whole(one.step) },
      { title: "State", cell: (one) => [pill(one.state), one.problem && h("small", { class: "failure" }, one.problem)] },
      { title: "Loss", number: true, cell: (one) => fixed(one.loss, 4) },
      { title: "Validation loss", number: true, cell: (one) => [fixed(one.eval_loss, 4), one.eval_loss === best && h("small", null, "best")] },
      { title: "Size", number: true, cell: (one) => bytes(one.size_bytes) },
      { title: "Saved", number: true, cell: (one) => ago(one.saved_at) },
      { title: "Fingerprint", cell: (one) => h("code", null, one.fingerprint.split(":").pop().slice(0, 16)) },
      { title: "", className: "all", cell: (one) => h("div", { class: "actions" }, verifyButton(one),
        h("button", { type: "button", onclick: () => { shown = one.name; showCommands(found, one); commands.scrollIntoView({ block: "nearest" }); } }, "Commands")) },
    ], rows, { caption: "Checkpoints", empty: "No checkpoint yet.", stacked: true }),
    rules.length && h("p", { class: "muted" }, rules.map(([key, value]) => h("code", null, `checkpoint.${key}=${value} `)))));
    const usable = rows.filter((entry) => entry.state !== "quarantined");
    const chosen = usable.find((entry) => entry.name === shown) ?? usable[0];
    if (chosen) showCommands(found, chosen);
    else { replace(commands); delete commands.dataset.key; }
  }
  await refresh();
  return { refresh };
}
