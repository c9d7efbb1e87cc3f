// The board of a run: threads from the server, filtered there; posts that come live join their thread, or begin one.

import { $, $$, announce, atEnd, fmt, icon, readJson } from "./dom.js";

const board = $("#board"), form = $("#board-filter");
const words = readJson("state-words").posts;
const slot = (node, name) => $(`[data-f=${name}]`, node);
const drawn = (id) => document.getElementById(`post-${id}`);

const chosen = () => Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));

// as Filter.takes in polymorph_web/runs/board.py
function takes(p) {
  const { kind, agent, q } = chosen(), text = p.text.toLowerCase();
  return (!kind || p.kind === kind) && (!agent || p.agent === agent) && q.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function element(p, candidateUrl) {
  const node = $("#post-template").content.querySelector("article").cloneNode(true);
  const known = words[p.kind] || { icon: "dot", word: p.kind.replaceAll("_", " "), tone: "" };
  node.id = `post-${p.id}`;
  node.className = `post kind-${p.kind} ${p.agent}`;
  slot(node, "who").textContent = p.agent.slice(0, 2).replace(/^./, (c) => c.toUpperCase());
  slot(node, "agent").textContent = p.agent;
  const kind = Object.assign(document.createElement("span"), { className: `state ${known.tone}` });
  kind.append(icon(known.icon), known.word);
  slot(node, "kind").append(kind);
  slot(node, "when").href = `#post-${p.id}`;
  $("time", node).dateTime = new Date(p.at * 1000).toISOString();
  slot(node, "text").textContent = p.text;
  slot(node, "link").hidden = !p.artifact_hash;
  if (p.artifact_hash) slot(node, "link").href = candidateUrl(p.artifact_hash);
  return node;
}

function clocks() {
  for (const time of $$("time[data-clock]", board)) time.textContent = fmt.clock(Date.parse(time.dateTime) / 1000);
}

// A thread goes to the end with its latest post, unless somebody is reading in it.
function show(thread, stay) {
  if (thread !== lastThread() && !thread.contains(document.activeElement)) board.append(thread);
  $("#board-empty").hidden = true;
  clocks();
  if (stay) board.scrollTop = board.scrollHeight;
}
const lastThread = () => $$(".thread", board).at(-1);

// The thread with this post, where the filter takes it: it may lie on an earlier page.
async function fetchThread(id) {
  const query = new URLSearchParams({ ...chosen(), thread: id });
  const page = new DOMParser().parseFromString(await (await fetch(`${board.dataset.url}?${query}`)).text(), "text/html");
  return $(".thread", page);
}

export async function drawPost(p, candidateUrl) {
  if (drawn(p.id)) return;
  const agents = $("#board-agents");
  if (![...agents.options].some((option) => option.value === p.agent)) agents.add(new Option(p.agent));
  const stay = atEnd(board), parent = p.reply_to && drawn(p.reply_to);
  if (parent) {
    const thread = parent.closest(".thread");
    thread.append(element(p, candidateUrl));
    show(thread, stay);
  } else if (p.reply_to) {
    const thread = await fetchThread(p.id);
    if (thread && !drawn(p.id)) show(thread, stay);
  } else if (takes(p)) {
    const thread = Object.assign(document.createElement("div"), { className: "thread" });
    thread.append(element(p, candidateUrl));
    show(thread, stay);
  }
}

document.addEventListener("htmx:afterSwap", (event) => {
  if (!board.contains(event.target) && event.target !== board) return;
  clocks();
  if (event.target !== board) return; // earlier posts: what is read stays in its place
  board.scrollTop = board.scrollHeight;
  const threads = $$(".thread", board).length;
  announce(threads ? $(".board-note", board)?.textContent.split(".")[0] || "All threads" : "No post matches");
});

clocks();
board.scrollTop = board.scrollHeight;
if (location.hash.startsWith("#post-") && !document.getElementById(location.hash.slice(1))) {
  fetchThread(location.hash.slice(6)).then((thread) => {
    if (!thread) return;
    show(thread, false);
    location.replace(location.hash); // now that it is there: go to it, and mark it
  });
}
