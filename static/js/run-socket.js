// Events of a run, in order and once each: over a socket, with back-off when it drops, by polling while it stays down.

export class RunFeed {
  // `apply(event)` gets each event with a seq above `last` exactly once; `show(state, since)` gets live | reconnecting | stale.
  constructor({ socketPath, eventsUrl, last, apply, show }) {
    Object.assign(this, { socketPath, eventsUrl, last, apply, show });
    this.tries = 0;
    this.heard = Date.now();
    this.ended = false;
    addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.retryNow(); });
  }

  open() {
    if (this.ended) return;
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    this.socket = new WebSocket(`${scheme}://${location.host}${this.socketPath}?after=${this.last}`);
    this.socket.onopen = () => { this.tries = 0; this.heard = Date.now(); this.show("live"); };
    this.socket.onmessage = (message) => { this.heard = Date.now(); this.take(JSON.parse(message.data)); };
    this.socket.onclose = (event) => this.lost(event);
  }

  take(event) {
    if (event.seq === undefined) return;
    if (event.seq <= this.last) return; // seen already: a reconnect overlaps
    this.last = event.seq;
    this.apply(event);
  }

  lost(event) {
    this.socket = null;
    if (this.ended) return;
    if (event.code === 4404) { this.show("stale", this.heard); return; } // no longer ours to see
    this.tries += 1;
    const wait = Math.min(15000, 500 * 2 ** Math.min(this.tries, 5)) * (0.75 + 0.5 * Math.random());
    this.show(Date.now() - this.heard > 20000 ? "stale" : "reconnecting", this.heard);
    this.timer = setTimeout(() => this.again(), wait);
  }

  async again() {
    if (this.tries > 2) await this.poll();
    this.open();
  }

  retryNow() {
    if (this.socket || this.ended) return;
    clearTimeout(this.timer);
    this.tries = 0;
    this.open();
  }

  async poll() {
    try {
      const response = await fetch(`${this.eventsUrl}?after=${this.last}`);
      if (!response.ok) return;
      for (const event of (await response.json()).events) this.take(event);
      this.heard = Date.now();
    } catch { /* the next try says the same through the pill */ }
  }

  end() {
    this.ended = true;
    clearTimeout(this.timer);
    this.socket?.close(1000);
    this.show("ended");
  }
}
