// One lease on a gang: sections 2, 8 to 11, 14 and 15 of proto/SPEC.md.
import { randomBytes } from "node:crypto";
import { Dealer } from "zeromq";
import { follows } from "./states.mjs";
import { Kind, RESYNC, WireError, body, header, read } from "./wire.mjs";

const HELLO_LIMIT_MS = 10_000;
const MOST_REFUSALS = 2; // in a row; more are a defect
const MAX_FRAME_BYTES = 64 * 2 ** 20;

/** The lease is over, for a reason that the message gives. */
export class Over extends Error {}

/**
 * `run(scheduler of facts)` drives the gang until the scheduler is idle. Who the scheduler is, is made when the facts
 * are there.
 */
export class Lease {
  constructor(endpoint, name) {
    this.name = name;
    this.lease = randomBytes(4).readUInt32LE() || 1;
    this.epoch = 0;
    this.held = false;
    this.state = "";
    this.facts = null;
    this.fault = null;
    this.timeoutMs = HELLO_LIMIT_MS;
    this.nextSeq = 1;
    this.unanswered = [];
    this.refused = 0; // primary refusals since a step was taken
    this.resync = false;
    this.startOver = false;
    this.lost = false; // with an epoch
    this.socket = new Dealer({ linger: 0, maxMessageSize: MAX_FRAME_BYTES });
    this.socket.connect(endpoint);
    this.out = Promise.resolve(); // a socket sends one message at a time
    this.heard = this.said = Date.now();
  }

  send(kind, value = null, more = {}) {
    const epoch = kind === Kind.HELLO ? 0 : this.epoch;
    const frames = [header(kind, { lease: this.lease, epoch, ...more }), value === null ? Buffer.alloc(0) : body(value)];
    this.said = Date.now();
    this.out = this.out.then(() => this.socket.send(frames));
  }

  /** Resolves once the scheduler that `make(facts)` returns is idle; rejects with what ended the lease. */
  async run(make) {
    const clock = setInterval(() => this.watch(), 20);
    this.send(Kind.HELLO, { client: this.name, features: [], takeover: false });
    try {
      for await (const frames of this.socket) {
        this.heard = Date.now();
        this.take(read(frames));
        if (this.facts && !this.scheduler) this.scheduler = make(this.facts);
        if (this.scheduler) this.submit();
        if (this.scheduler?.idle && !this.unanswered.length) return;
      }
      throw this.failure ?? new Over("the socket was closed");
    } finally {
      clearInterval(clock);
      await this.leave();
    }
  }

  watch() {
    const now = Date.now();
    if (now - this.heard >= this.timeoutMs) {
      this.failure = new Over(`nothing was heard for ${this.timeoutMs} ms`);
      this.held = false;
      this.socket.close();
    } else if (this.held && now - this.said >= this.timeoutMs / 4) {
      this.send(Kind.PING);
    }
  }

  async leave() {
    if (this.socket.closed) return;
    if (this.held) this.send(Kind.BYE, { code: "", message: "" });
    this.held = false;
    await this.out.catch(() => {});
    this.socket.linger = 200;
    this.socket.close();
  }

  /** Sends every step that can go. What did not happen is planned anew once everything is answered. */
  submit() {
    const ready = () => this.held && this.state === "READY" && this.facts;
    if (!ready() || (this.startOver && this.unanswered.length)) return;
    if (this.startOver) {
      this.scheduler.startOver(this.facts, this.lost);
      this.startOver = this.lost = false;
    }
    while (this.unanswered.length < this.facts.limits.steps_in_flight) {
      const step = this.scheduler.plan();
      if (step === null) return;
      const seq = this.nextSeq++;
      this.unanswered.push(seq);
      this.send(Kind.STEP, step, { seq, flags: this.resync ? RESYNC : 0 });
      this.resync = false;
    }
  }

  /** Section 10. Throws what ends the lease. */
  take({ kind, epoch, lease, seq, message }) {
    if (lease !== this.lease) throw new WireError(`a message of lease ${lease} came to ${this.lease}`);
    if (kind === Kind.PING) return this.send(Kind.PONG);
    if (kind === Kind.PONG) return undefined;
    if (kind === Kind.WELCOME) return this.welcome(epoch, message);
    if (kind === Kind.ERROR) return this.error(message);
    if (kind === Kind.BYE) {
      this.held = false;
      throw new Over(this.fault ? `the gang failed: ${this.fault.message}` : `Bye ${message.code}: ${message.message}`);
    }
    if (!this.held) throw new WireError(`kind ${kind} came without a lease`);
    if (kind === Kind.EVENT) return this.event(epoch, message);
    if (epoch !== this.epoch) throw new WireError(`an answer of epoch ${epoch} came in epoch ${this.epoch}`);
    if (seq !== this.unanswered[0]) throw new WireError(`the answer to ${seq} came, ${this.unanswered[0]} is next`);
    if (kind === Kind.DONE) throw new WireError(`Done ${seq} came, and it was a step`);
    this.unanswered.shift();
    if (kind === Kind.REFUSED) return this.refusal(seq, message);
    this.refused = 0;
    return this.scheduler.receive(message.tokens);
  }

  welcome(epoch, { state, lease_timeout_ms: timeoutMs, facts }) {
    if (this.held) throw new WireError("a second Welcome");
    Object.assign(this, { held: true, epoch, state, timeoutMs, facts: facts ?? null });
  }

  event(headed, { state, epoch, last_answered: answered = 0, facts = null, fault = null }) {
    if (epoch < this.epoch || epoch !== headed) throw new WireError(`an Event of epoch ${epoch} came in ${this.epoch}`);
    if (!follows(this.state, state)) throw new WireError(`Event ${state} came, and the gang was ${this.state}`);
    Object.assign(this, { state, epoch, facts: facts ?? this.facts });
    if (state === "READY") this.fault = null;
    if (state !== "FAILED") return;
    // It answers everything that is open; the next epoch, if there is one, goes on behind the last answer.
    Object.assign(this, { fault: fault ?? { message: "" }, facts: null, unanswered: [], nextSeq: answered + 1 });
    Object.assign(this, { startOver: true, lost: true, refused: 0, resync: false });
  }

  /** Section 15: steps behind a refused one come back AFTER_REFUSAL; then the next has RESYNC. */
  refusal(seq, { code, message }) {
    this.startOver = this.resync = true;
    if (code === "AFTER_REFUSAL") return;
    if (++this.refused > MOST_REFUSALS) throw new Error(`step ${seq} was refused, ${code}: ${message}`);
    console.error(`step ${seq} was refused, ${code}: ${message}; going on`);
  }

  /** Section 14: the frame counts as never sent. */
  error({ code, seq = 0, message = "" }) {
    if (!this.held || code === "LEASE_ENDED" || code === "BAD_LEASE") {
      this.held = false;
      throw new Over(`${code}: ${message}`);
    }
    if (code === "BAD_EPOCH") return; // Event FAILED has answered it
    if (code !== "NOT_READY") throw new Error(`frame ${seq} was in error, ${code}: ${message}`);
    if (!this.unanswered.includes(seq)) return;
    this.unanswered = this.unanswered.filter((other) => other !== seq);
    this.nextSeq = Math.min(this.nextSeq, seq);
    this.startOver = true;
  }
}
