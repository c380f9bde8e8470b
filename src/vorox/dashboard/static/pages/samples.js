// The completions of the fixed prompts over the steps, and a box that prompts a checkpoint.

import { ask, isExport, post } from "../api.js";
import { card, h, replace } from "../dom.js";
import { whole } from "../format.js";

export async function samplesPage(root, { run }) {
  const grid = h("div"), box = isExport ? null : await promptBox(run);
  replace(root, box, grid);
  async function refresh() {
    const found = await ask("samples", { id: run });
    if (!found.prompts.length) {
      return void replace(grid, card("Samples", h("p", { class: "note" },
        "No samples yet. Set eval.prompts: each validation completes them, and this page shows them step by step.")));
    }
    const before = grid.querySelector(".samples");
    const isAtEnd = !before || before.scrollLeft + before.clientWidth >= before.scrollWidth - 1;
    const left = before?.scrollLeft;
    const label = (index) => `Step ${whole(found.steps[index])} · ${index + 1} of ${found.steps.length}`;  // one at a time
    replace(grid, card("Samples by step", h("div", { class: "scroll samples", tabindex: 0, role: "region", "aria-label": "Samples by step" },
      h("table", null,
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "Prompt"), found.steps.map((step) => h("th", { scope: "col" }, `Step ${whole(step)}`)))),
        h("tbody", null, found.prompts.map((row) => h("tr", null, h("th", { scope: "row" }, h("code", null, row.prompt)),
          row.texts.map((text, index) => h("td", { "data-label": label(index) }, text === null ? h("span", { class: "muted" }, "–") : h("div", { class: "text" }, text))))))))));
    grid.querySelector("table").style.setProperty("--steps", found.steps.length);
    const shown = grid.querySelector(".samples");
    shown.scrollLeft = isAtEnd ? shown.scrollWidth : left;  // the newest samples are the last columns
  }
  await refresh();
  return { refresh };
}

async function promptBox(run) {
  const found = (await ask("checkpoints", { id: run })).checkpoints.filter((one) => one.state !== "quarantined").reverse();
  if (!found.length) return null;
  const text = h("textarea", { rows: 3, placeholder: "Once upon a time", "aria-label": "Prompt" });
  const field = (name, node) => h("label", null, h("span", { class: "label" }, name), node);
  const step = h("select", null, found.map((one) => h("option", { value: one.step }, `step ${whole(one.step)}`)));
  const number = (value, properties) => h("input", { type: "number", value, ...properties });
  const tokens = number(64, { min: 1, max: 1024 }), temperature = number(0.8, { min: 0, max: 5, step: 0.1 });
  const seed = number(0, { min: 0 });
  const answer = h("div", { class: "answer", "aria-live": "polite" });
  const send = h("button", { type: "submit", class: "primary" }, "Complete");
  const form = h("form", { onsubmit: async (event) => {
    event.preventDefault();
    if (!text.value) return void text.focus();
    send.disabled = true;
    replace(answer, h("p", { class: "muted" }, "Loading the checkpoint ..."));
    try {
      const body = { id: run, step: Number(step.value), prompt: text.value, tokens: Number(tokens.value),
                     temperature: Number(temperature.value), seed: Number(seed.value) };
      const [{ prompt, completion }] = (await post("generate", body)).completions;
      replace(answer, h("pre", null, h("span", { class: "muted" }, prompt), completion));
    } catch (error) {
      replace(answer, h("p", { class: "problem" }, error.message));
    }
    send.disabled = false;
  } }, text, h("div", { class: "bar" }, field("Checkpoint", step), field("Tokens", tokens), field("Temperature", temperature), field("Seed", seed),
    h("span", { class: "grow" }), send), answer);
  return card("Prompt a checkpoint", form);
}
