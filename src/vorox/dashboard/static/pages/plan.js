// Estimate against actual: memory, speed, duration, disk.

import { ask } from "../api.js";
import { card, dataTable, h, replace } from "../dom.js";
import { bytes, count, duration, percent } from "../format.js";

const PLAN_FORMATS = { bytes, s: duration, tokens: count, "tokens/s": (value) => (value === null ? count(value) : `${count(value)} tokens/s`) };

export async function planPage(root, { run }) {
  async function refresh() {
    const found = await ask("plan", { id: run });
    const total = found.memory_parts.reduce((sum, part) => sum + part.bytes, 0);
    const share = (part) => {
      const node = h("div", { class: "shares" }, h("span"));
      node.firstChild.style.width = `${(part.bytes / total) * 100}%`;
      return node;
    };
    replace(root,
      card("Estimate against actual", dataTable([
        { title: "Quantity", cell: (one) => h("b", null, one.name), className: "all row-title" },
        { title: "Estimated", number: true, cell: (one) => PLAN_FORMATS[one.unit](one.planned) },
        { title: "Actual", number: true, cell: (one) => PLAN_FORMATS[one.unit](one.actual) },
        { title: "Actual / estimated", number: true, cell: (one) => percent(one.ratio, 0) },
        { title: "Note", cell: (one) => one.note && h("span", { class: "muted" }, one.note), className: "all" },
      ], found.rows, { caption: "Estimate against actual", stacked: true })),
      found.memory_parts.length ? card("Estimated memory of a device", dataTable([
        { title: "Part", cell: (one) => one.name },
        { title: "Size", number: true, cell: (one) => bytes(one.bytes) },
        { title: "Share", cell: share, className: "wide" },
      ], found.memory_parts, { caption: "Estimated memory of a device" })) : null);
  }
  await refresh();
  return { refresh };
}
