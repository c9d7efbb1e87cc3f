// The try-it box: streams one answer through the gateway and says which version gave it and how soon.

import { $, announce, fmt } from "./dom.js";

const form = $("#try-form"), answer = $("#try-answer"), facts = $("#try-facts"), error = $("#try-error");
const stop = $("[data-stop]", form), send = $("button[type=submit]", form);
const fact = (name, text) => { $(`[data-fact=${name}]`, facts).textContent = text; };
const ms = (value) => (value < 10000 ? `${fmt.significant(value)} ms` : `${fmt.significant(value / 1000)} s`);
let control = null;

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (control) return;
  control = new AbortController();
  answer.textContent = "";
  error.hidden = facts.hidden = true;
  stop.hidden = false;
  send.disabled = true;
  const start = performance.now();
  try {
    const response = await fetch(form.action, { method: "POST", body: new FormData(form), signal: control.signal });
    if (!response.ok) throw new Error(await reason(response));
    fact("version", response.headers.get("x-polymorph-version") || "unknown");
    fact("first", "…");
    fact("total", "…");
    facts.hidden = false;
    await show(response.body.pipeThrough(new TextDecoderStream()).getReader(), start);
    fact("total", ms(performance.now() - start));
    announce("The answer is complete.");
  } catch (problem) {
    if (problem.name !== "AbortError") {
      $("[data-text]", error).textContent = problem.message;
      error.hidden = false;
    }
  } finally {
    control = null;
    stop.hidden = true;
    send.disabled = false;
  }
});

async function show(reader, start) {
  let first = true;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    if (first && value) { fact("first", ms(performance.now() - start)); first = false; }
    answer.append(value);
    answer.scrollTop = answer.scrollHeight;
  }
}

async function reason(response) {
  const text = await response.text();
  try { return JSON.parse(text).error; } catch { return `The server answered ${response.status}. Reload the page and try again.`; }
}

stop.addEventListener("click", () => control?.abort());
