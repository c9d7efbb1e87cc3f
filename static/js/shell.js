// The shell of every page: theme, dialogs, command palette, shortcuts, tables, relative times, polled regions.

import { $, $$, announce } from "./dom.js";

// ---- theme ----
const theme = window.polymorphTheme;
function showTheme() {
  for (const button of $$("[data-theme-choice]")) button.setAttribute("aria-pressed", String(button.dataset.themeChoice === theme.choice()));
}
document.addEventListener("themechange", showTheme);
showTheme();

// ---- dialogs, rail, menus ----
const open = (id) => { const dialog = document.getElementById(id); if (dialog && !dialog.open) dialog.showModal(); };
const rail = $("#rail");
const railButton = $("[data-toggle-rail]");
function toggleRail(show) {
  rail.toggleAttribute("data-open", show);
  railButton.setAttribute("aria-expanded", String(show));
  if (show) $("a, button", rail).focus();
}
document.addEventListener("click", (event) => {
  const at = event.target.closest("[data-theme-choice], [data-open-dialog], [data-close-dialog], [data-toggle-rail], [data-copy], tr[data-href]");
  if (rail?.hasAttribute("data-open") && !event.target.closest("#rail, [data-toggle-rail]")) toggleRail(false);
  for (const menu of $$("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  if (event.target.tagName === "DIALOG") event.target.close(); // the backdrop
  if (!at) return;
  if (at.dataset.themeChoice) theme.set(at.dataset.themeChoice);
  else if (at.dataset.openDialog) open(at.dataset.openDialog);
  else if ("closeDialog" in at.dataset) at.closest("dialog").close();
  else if ("toggleRail" in at.dataset) toggleRail(!rail.hasAttribute("data-open"));
  else if (at.dataset.copy) copy(at);
  else if (at.dataset.href && !event.target.closest("a, button, input, label") && !getSelection().toString()) location.assign(at.dataset.href);
});

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent.trim());
    announce("Copied");
    const word = $("[data-word]", button);
    if (word) { word.textContent = "Copied"; setTimeout(() => { word.textContent = "Copy"; }, 2000); }
  } catch {
    getSelection().selectAllChildren(source); // no clipboard access: select it for the person
  }
}

// ---- command palette ----
const palette = $("#palette");
if (palette) {
  const input = $("input", palette), items = $$("li", palette), none = $(".none", palette);
  const shown = () => items.filter((item) => !item.hidden);
  const select = (item) => {
    for (const each of items) each.setAttribute("aria-selected", String(each === item));
    if (item) { input.setAttribute("aria-activedescendant", item.id); item.scrollIntoView({ block: "nearest" }); }
    else input.removeAttribute("aria-activedescendant");
  };
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const item of items) item.hidden = !words.every((word) => item.textContent.toLowerCase().includes(word));
    none.hidden = shown().length > 0;
    select(shown()[0]);
  };
  const run = (item) => {
    if (!item) return;
    palette.close();
    if (item.dataset.themeTo) theme.set(item.dataset.themeTo);
    else location.assign(item.dataset.href);
  };
  new MutationObserver(() => { if (palette.open) { input.value = ""; filter(); input.focus(); } }).observe(palette, { attributes: true, attributeFilter: ["open"] });
  input.addEventListener("input", filter);
  input.addEventListener("keydown", (event) => {
    const all = shown(), at = all.findIndex((item) => item.getAttribute("aria-selected") === "true");
    if (event.key === "ArrowDown") { event.preventDefault(); select(all[(at + 1) % all.length]); }
    else if (event.key === "ArrowUp") { event.preventDefault(); select(all[(at - 1 + all.length) % all.length]); }
    else if (event.key === "Enter") { event.preventDefault(); run(all[at]); }
  });
  palette.addEventListener("click", (event) => run(event.target.closest("li")));
}

// ---- shortcuts ----
const single = $("[data-single-keys]");
const singleOn = () => { try { return localStorage.getItem("single-keys") !== "off"; } catch { return true; } };
if (single) {
  single.checked = singleOn();
  single.addEventListener("change", () => localStorage.setItem("single-keys", single.checked ? "on" : "off"));
}
let pending = "";
document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") { event.preventDefault(); open("palette"); return; }
  if (event.key === "Escape" && rail?.hasAttribute("data-open")) { toggleRail(false); railButton.focus(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || !singleOn()) return;
  if (event.target.closest("input, textarea, select, dialog, [contenteditable]")) return;
  if (pending === "g") {
    pending = "";
    const to = { f: "#po-fleet", a: "#po-audit", s: "#po-support" }[event.key];
    if (to && $(to)) { location.assign($(to).dataset.href); return; }
  }
  if (event.key === "g") { pending = "g"; setTimeout(() => { pending = ""; }, 1200); }
  else if (event.key === "?") open("shortcuts");
  else if (event.key === "t") theme.set({ auto: "light", light: "dark", dark: "auto" }[theme.choice()]);
  else if (event.key === "/") { const field = $("[data-filter-for]") || $("input[type=search]"); if (field) { event.preventDefault(); field.focus(); } }
  else if (event.key === "j" || event.key === "k") moveRow(event.key === "j" ? 1 : -1);
});

// ---- tables: j and k walk the rows' links, the filter hides rows ----
function moveRow(step) {
  const table = document.activeElement?.closest("table[data-rows]") || $("table[data-rows]");
  if (!table) return;
  const links = $$("tbody tr:not([hidden])", table).map((row) => $("a", row)).filter(Boolean);
  const row = document.activeElement?.closest("tr");
  const at = links.findIndex((link) => row?.contains(link));
  const next = links[at === -1 ? (step > 0 ? 0 : links.length - 1) : Math.max(0, Math.min(links.length - 1, at + step))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}
function applyFilter(input) {
  const table = document.getElementById(input.dataset.filterFor);
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of $$("tbody tr", table)) {
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    if (!row.hidden) shown += 1;
  }
  const note = document.getElementById(`${input.dataset.filterFor}-none`);
  if (note) note.hidden = shown > 0 || !words.length;
}
document.addEventListener("input", (event) => { if (event.target.dataset?.filterFor) applyFilter(event.target); });
document.addEventListener("rowschanged", () => $$("[data-filter-for]").filter((f) => f.value).forEach(applyFilter));

// ---- fields that only make sense for some choice: data-show-when="name=value other=value" ----
function showFields() {
  for (const part of $$("[data-show-when]")) {
    part.hidden = !part.dataset.showWhen.split(" ").some((rule) => {
      const [name, value] = rule.split("=");
      const form = part.closest("form");
      return new FormData(form).get(name) === value;
    });
  }
}
if ($("[data-show-when]")) { showFields(); document.addEventListener("change", showFields); }

// ---- relative times ----
const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto", style: "short" });
export function ago(date, now = Date.now()) {
  const seconds = (date.getTime() - now) / 1000;
  for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]]) {
    if (Math.abs(seconds) >= size) return relative.format(Math.round(seconds / size), unit);
  }
  return Math.abs(seconds) < 10 ? "just now" : relative.format(Math.round(seconds), "second");
}
function showTimes() {
  for (const element of $$("time[data-relative]")) {
    const date = new Date(element.dateTime);
    element.title = date.toLocaleString();
    const text = ago(date);
    if (element.textContent !== text) element.textContent = text;
  }
}
showTimes();
setInterval(showTimes, 15000);

// ---- regions that htmx polls: the pill says whether they are fresh ----
const pollPill = $("[data-poll-pill]");
let lastGood = Date.now(), said = "";
function pollState(good) {
  if (good) lastGood = Date.now();
  if (!pollPill) return;
  const stale = Date.now() - lastGood > 10000;
  pollPill.dataset.state = $("[data-polling]") ? (good ? "live" : stale ? "stale" : "reconnecting") : "ended";
  const since = $("[data-since]", pollPill);
  if (since) since.textContent = new Date(lastGood).toLocaleTimeString([], { hour12: false });
}
document.addEventListener("htmx:afterRequest", (event) => { if (event.target.matches?.("[data-polling]") || event.detail.elt?.matches?.("[data-polling]")) pollState(event.detail.successful); });
document.addEventListener("htmx:sendError", () => pollState(false));
document.addEventListener("htmx:afterSettle", () => {
  showTimes();
  const note = $("[data-announce]")?.dataset.announce;
  if (note && said && note !== said) announce(note);
  said = note || said;
  if (pollPill && !$("[data-polling]")) pollState(true);
});
said = $("[data-announce]")?.dataset.announce || "";
