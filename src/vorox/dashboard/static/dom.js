// Elements from plain values. Text is always set as text, never as HTML: run names and samples are not trusted.

const SVG = "http://www.w3.org/2000/svg";

function setProperties(node, properties) {
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked" || key === "disabled" || key === "selected") node[key] = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
}

export function h(tag, properties, ...children) {
  const node = document.createElement(tag);
  setProperties(node, properties);
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function svg(tag, properties, ...children) {
  const node = document.createElementNS(SVG, tag);
  setProperties(node, properties);
  node.append(...children);
  return node;
}

export function replace(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// A table in a box that scrolls sideways; columns: [{title, cell: row => node or text, number, className}].
// stacked: on a narrow screen, each row becomes a block of named values, so that nothing is cut off.
export function dataTable(columns, rows, { caption = "", empty = "None.", stacked = false } = {}) {
  if (!rows.length) return h("p", { class: "note" }, empty);
  const head = h("tr", null, columns.map((column) =>
    h("th", { scope: "col", class: column.number ? "number" : null }, column.title)));
  const body = rows.map((row) => h("tr", null, columns.map((column) =>
    h("td", { class: [column.number ? "number" : "", column.className ?? ""].join(" ").trim() || null, "data-label": column.title }, column.cell(row)))));
  return h("div", { class: stacked ? "scroll stacked" : "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", null, caption && h("caption", null, caption), h("thead", null, head), h("tbody", null, body)));
}

export function card(title, ...children) {
  return h("section", { class: "card" }, title && h("h2", null, title), ...children);
}

export function pill(state) {
  return h("span", { class: `pill ${String(state).replace(/[^a-z]/g, "")}` }, state);
}

// A set of exclusive choices: [[value, label], ...].
export function choice(label, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) =>
    h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => {
      for (const [index, button] of buttons.entries()) button.setAttribute("aria-pressed", String(options[index][0] === value));
      onChoose(value);
    } }, text));
  return h("div", { class: "choice", role: "group", "aria-label": label }, h("span", { class: "label" }, label), buttons);
}

// A command with a button that copies it.
export function command(text) {
  const button = h("button", { type: "button", class: "quiet", "aria-label": `Copy: ${text}`, onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it";
      getSelection().selectAllChildren(code);
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  const code = h("code", null, text);
  return h("div", { class: "command" }, code, button);
}

export function sparkline(values, label) {
  if (values.length < 2) return h("span", { class: "muted" }, "–");
  const low = Math.min(...values), high = Math.max(...values), width = 96, height = 22;
  const points = values.map((value, index) => {
    const x = (index / (values.length - 1)) * (width - 2) + 1;
    const y = height - 2 - ((value - low) / (high - low || 1)) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  return svg("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    svg("polyline", { points: points.join(" ") }));
}
