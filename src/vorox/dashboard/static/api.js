// Questions to the server, or to the answers inside an exported file.

const embedded = document.getElementById("snapshot");
const answers = embedded ? JSON.parse(embedded.textContent) : null;

export const isExport = answers !== null;

export async function ask(name, query = {}) {
  if (answers) {
    const answer = answers[query.id === undefined ? name : `${name}?id=${query.id}`];
    if (answer === undefined) throw new Error("This is not part of an exported file; open the dashboard with `vorox dash`.");
    if (answer.error) throw new Error(answer.error);
    return answer;
  }
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return read(await fetch(`/api/${name}?${new URLSearchParams(given)}`));
}

export async function post(name, body) {
  return read(await fetch(`/api/${name}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  }));
}

async function read(response) {
  const type = response.headers.get("content-type") ?? "";
  const value = type.includes("json") ? await response.json() : { error: await response.text() };
  if (!response.ok || value.error) throw new Error([value.error, value.hint].filter(Boolean).join(" – "));
  return value;
}

// Call onChange(ids) when runs change, at most every second; onState reports whether changes are watched. What changed
// before that is not reported: when it becomes true, also after a lost connection, read again what was read before.
export function follow(onChange, onState) {
  if (answers) return;
  const source = new EventSource("/api/live");
  source.addEventListener("watching", () => onState(true));
  source.addEventListener("changed", (event) => onChange(new Set(JSON.parse(event.data))));
  source.addEventListener("error", () => onState(false));
}
