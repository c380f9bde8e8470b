// Routes, theme and live updates. A page is a function (root, address) that returns {refresh(), close()}.

import { ask, follow, isExport } from "./api.js";
import { redrawCharts } from "./charts.js";
import { h, pill, replace } from "./dom.js";
import { DASH, count, duration, fixed, percent, whole } from "./format.js";
import { checkpointsPage } from "./pages/checkpoints.js";
import { comparePage } from "./pages/compare.js";
import { curvesPage } from "./pages/curves.js";
import { dataPage } from "./pages/data.js";
import { healthPage } from "./pages/health.js";
import { planPage } from "./pages/plan.js";
import { reExecutionPage } from "./pages/re_execution.js";
import { runsPage } from "./pages/runs.js";
import { samplesPage } from "./pages/samples.js";
import { settingsPage } from "./pages/settings.js";

const PAGES = {
  curves: ["Curves", curvesPage], samples: ["Samples", samplesPage], data: ["Data", dataPage],
  health: ["Health", healthPage], plan: ["Plan", planPage], checkpoints: ["Checkpoints", checkpointsPage],
  re_execution: ["Re-execution", reExecutionPage], settings: ["Settings", settingsPage],
};
const main = document.getElementById("main");
let openPage = null, openRun = null, navigation = 0;
let isRefreshing = false, isStale = false, retry = null;

function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map(decodeURIComponent);
  return { section: parts[0] || "runs", run: parts[1], page: parts[2] || "curves", query: new URLSearchParams(query) };
}

async function route() {
  if (location.hash === "#main") return;
  const here = address(), mine = (navigation += 1);
  openPage?.close?.();
  openPage = null;
  openRun = here.section === "run" ? here.run : null;
  const root = h("div", { class: "page" }, h("p", { class: "note" }, "Loading ..."));
  replace(document.getElementById("sections"), sectionLinks(here));
  try {
    let page = null, head = null;
    if (here.section === "run" && PAGES[here.page]) {
      head = runHead(here);
      replace(main, head.root, root);
      head.showTab();
      [page] = await Promise.all([PAGES[here.page][1](root, here), head.refresh()]);
    } else if (here.section === "compare") {
      replace(main, root);
      page = await comparePage(root, here);
    } else {
      replace(main, root);
      page = await runsPage(root, here);
    }
    if (mine !== navigation) return void page?.close?.();
    openPage = { close: () => page?.close?.(), refresh: async () => { await head?.refresh(); await page?.refresh?.(); } };
    if (isStale) refresh();
  } catch (error) {
    if (mine !== navigation) return;
    replace(root, h("p", { class: "problem", role: "alert" }, error.message));
    openPage = { refresh: route };  // at the next change, or once there is a connection again
  }
}

function sectionLinks(here) {
  const link = (href, text, isHere) => h("a", { href, "aria-current": isHere ? "page" : null }, text);
  return [
    link("#/runs", "Runs", here.section === "runs"),
    !isExport && link("#/compare", "Compare", here.section === "compare"),
  ];
}

function runHead(here) {
  const facts = h("dl", { class: "facts" }), state = h("span");
  const base = `#/run/${encodeURIComponent(here.run)}`;
  const tabs = Object.entries(PAGES).map(([key, [title]]) =>
    h("a", { href: `${base}/${key}`, "aria-current": key === here.page ? "page" : null }, title));
  const root = h("div", { class: "head" },
    h("h1", null, here.run, state), facts, h("nav", { class: "tabs", "aria-label": "Pages of the run" }, tabs));
  document.title = `${here.run} · Vorox`;
  return {
    root,
    showTab() {  // on a narrow screen, the tabs scroll sideways
      const tab = tabs.find((one) => one.hasAttribute("aria-current")), bar = tab.parentElement;
      bar.scrollLeft = tab.offsetLeft - bar.offsetLeft - (bar.clientWidth - tab.offsetWidth) / 2;
    },
    async refresh() {
      const row = (await ask("runs")).runs.find((run) => run.id === here.run);
      if (!row) throw new Error(`Run ${here.run} not found.`);
      replace(state, pill(row.state));
      const fact = (name, value) => h("div", null, h("dt", null, name), h("dd", null, value));
      replace(facts,
        fact("Step", row.total_steps ? `${whole(row.step)} / ${whole(row.total_steps)}` : whole(row.step)),
        fact("Loss", fixed(row.loss)), fact("Validation", fixed(row.eval_loss, 4)),
        fact("Tokens", count(row.tokens)), fact("Tokens/s", whole(row.tokens_per_second)),
        row.mfu_fraction !== null && row.mfu_fraction !== undefined && fact("MFU", percent(row.mfu_fraction)),
        row.state === "running" && fact("ETA", duration(row.eta_seconds)),
        fact("Engine", [row.engine, row.hardware].filter(Boolean).join(" · ") || DASH),
        fact("Commit", row.commit ? row.commit + (row.is_dirty ? " + changes" : "") : DASH));
    },
  };
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
  redrawCharts();
}

function startTheme() {
  let stored = null;
  try { stored = localStorage.getItem("vorox-theme"); } catch { /* storage is off */ }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(stored ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!stored) setTheme(dark.matches ? "dark" : "light"); });
  document.getElementById("theme").addEventListener("click", () => {
    stored = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("vorox-theme", stored); } catch { /* storage is off */ }
    setTheme(stored);
  });
}

// Read the open page again; what changes while it loads or is read is read afterwards, and what failed is tried again.
async function refresh() {
  isStale = true;
  if (isRefreshing || openPage === null) return;
  clearTimeout(retry);
  isRefreshing = true;
  isStale = false;
  let pauseMilliseconds = 500;
  try { await openPage.refresh(); } catch { [isStale, pauseMilliseconds] = [true, 5000]; }
  isRefreshing = false;
  if (isStale) retry = setTimeout(refresh, pauseMilliseconds);
}

// Call begin() once changes are watched, so that the first page need not be read twice, or after some seconds without.
function startLive(begin) {
  const live = document.getElementById("live");
  live.textContent = isExport ? "Exported" : "";
  if (isExport) return void begin();
  let isBegun = false;
  const read = () => {
    if (isBegun) return void refresh();
    isBegun = true;
    begin();
  };
  const patience = setTimeout(read, 3000);
  follow((changed) => {
    if (!document.hidden && (openRun === null || changed.has(openRun))) refresh();
  }, (isWatched) => {
    clearTimeout(patience);
    if (isWatched || !isBegun) read();
    live.textContent = isWatched ? "Live" : "Reconnecting";
    live.classList.toggle("up", isWatched);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
}

function start() {
  startTheme();
  addEventListener("hashchange", route);
  startLive(route);
}

if (globalThis.uPlot) start();
else addEventListener("load", start);
