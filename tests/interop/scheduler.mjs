// What runs next: sections 8, 12 and 15 of proto/SPEC.md. No socket: a step comes out, a result goes in.
import { SAMPLE, pack } from "./wire.mjs";

const GREEDY = [0, 0, 1, 0, 0, -1];

/** Greedy requests, run together as far as the gang's facts allow. Blocks are never shared. */
export class Scheduler {
  constructor(facts, stops) {
    this.stops = stops; // tokens that end a request
    this.requests = []; // unfinished, in the order in which they came
    this.begin(facts);
    this.nextId = 1;
  }

  /** Nothing is on the ranks, or nothing that is relied on. */
  begin(facts) {
    this.facts = facts;
    this.free = Array.from({ length: facts.kv.num_blocks }, (_, block) => facts.kv.num_blocks - 1 - block);
    this.inFlight = []; // what each step sent was: {sampled, started, finished}
    this.toFinish = []; // ids
    this.held = new Set(); // ids that live on the ranks, by the steps answered
  }

  get idle() {
    return !(this.requests.length || this.toFinish.length || this.inFlight.length);
  }

  add(prompt, maxTokens) {
    const { max_model_len: most, vocabulary, kv } = this.facts;
    const longest = Math.min(prompt.length + maxTokens, most);
    if (!prompt.length || prompt.length >= most) throw new Error(`a prompt has 1 to ${most - 1} tokens`);
    if (!prompt.every((token) => Number.isInteger(token) && token >= 0 && token < vocabulary)) {
      throw new Error(`tokens are 0 to ${vocabulary - 1}`);
    }
    if (this.blocksFor(longest) > kv.num_blocks) throw new Error(`${longest} tokens do not fit the cache`);
    const request = { tokens: [...prompt], prompt: prompt.length, longest };
    this.requests.push(this.renew(request));
    return request;
  }

  renew(request) {
    return Object.assign(request, { id: this.nextId++, state: "waiting", computed: 0, pending: 0, blocks: [] });
  }

  /**
   * The steps in flight did not happen: every unfinished request starts anew under another id, with the tokens that
   * have come. Unless the epoch is a new one, the ranks must be told to forget what they hold.
   */
  startOver(facts, lost) {
    const held = lost ? [] : [...this.held];
    this.begin(facts);
    this.toFinish = held;
    this.held = new Set(held);
    this.requests.forEach((request) => this.renew(request));
  }

  blocksFor(tokens) {
    return Math.ceil(tokens / this.facts.kv.block_size);
  }

  /** Members of the next Step, or null if there is nothing to do before the next result. */
  plan() {
    const { limits } = this.facts;
    const plan = { tokens: limits.tokens, rows: [], started: [], resumed: [], preempted: [] };
    for (const request of this.requests.filter(({ state }) => state === "running")) this.proceed(request, plan);
    if (!plan.preempted.length) this.admit(plan);
    if (!plan.rows.length && !plan.preempted.length && (!this.toFinish.length || this.inFlight.length)) return null;
    const finished = this.toFinish;
    this.toFinish = [];
    this.inFlight.push({
      sampled: plan.rows.filter(({ flags }) => flags).map(({ request }) => request),
      started: plan.started.map(([id]) => id),
      finished,
    });
    const column = (value) => pack(plan.rows.map(value));
    return [
      plan.started, plan.resumed, pack(finished), pack(plan.preempted),
      column(({ id }) => id), column(({ position }) => position), column(({ count }) => count),
      column(({ flags }) => flags), column(({ grants }) => grants.length), pack(plan.rows.flatMap(({ grants }) => grants)),
    ];
  }

  /** A row for a running request. Where blocks are short, who came last and has no row yet gives way. */
  proceed(request, plan) {
    const known = request.tokens.length + request.pending;
    const count = Math.min(known >= request.longest ? 0 : known - request.computed, plan.tokens);
    if (request.state !== "running" || count < 1 || plan.rows.length >= this.facts.limits.rows) return;
    const needed = this.blocksFor(request.computed + count) - request.blocks.length;
    while (needed > this.free.length) {
      const taken = new Set(plan.rows.map((row) => row.request));
      const last = this.requests.findLast((other) => other.state === "running" && !taken.has(other));
      this.preempt(last, plan);
      if (last === request) return;
    }
    this.row(request, count, this.grant(request, needed), plan);
  }

  row(request, count, grants, plan) {
    const samples = request.computed + count === request.tokens.length + request.pending;
    plan.rows.push({ request, id: request.id, position: request.computed, count, flags: samples ? SAMPLE : 0, grants });
    plan.tokens -= count;
    request.computed += count;
    request.pending += samples ? 1 : 0;
  }

  grant(request, number) {
    const grants = number > 0 ? this.free.splice(-number) : [];
    request.blocks.push(...grants);
    return grants;
  }

  preempt(request, plan) {
    this.free.push(...request.blocks);
    Object.assign(request, { state: "preempted", computed: 0, blocks: [] });
    plan.preempted.push(request.id);
  }

  /** Starts and resumes, in order, as long as all of a request's tokens have room. */
  admit(plan) {
    const { limits } = this.facts;
    let live = this.requests.filter(({ state }) => state !== "waiting").length + this.toFinish.length;
    for (const request of this.requests) {
      if (request.state === "running") continue;
      const needed = this.blocksFor(request.tokens.length);
      const room = plan.tokens > 0 && plan.rows.length < limits.rows && needed <= this.free.length;
      if (!room || request.pending) return; // one whose last token is under way cannot be resumed yet
      if (request.state === "waiting" && ++live > limits.live_requests) return;
      const shipped = [request.id, pack(request.tokens), pack(this.grant(request, needed)), 0];
      if (request.state === "waiting") plan.started.push([...shipped, GREEDY]);
      else plan.resumed.push(shipped);
      request.state = "running";
      this.row(request, Math.min(request.tokens.length, plan.tokens), [], plan);
    }
  }

  /** Takes in the result of the oldest step in flight. */
  receive(tokens) {
    const { sampled, started, finished } = this.inFlight.shift();
    if (tokens.length !== sampled.length) throw new Error(`${tokens.length} tokens came for ${sampled.length} rows`);
    finished.forEach((id) => this.held.delete(id));
    started.forEach((id) => this.held.add(id));
    sampled.forEach((request, place) => {
      request.pending -= 1;
      if (request.state === "finished") return;
      request.tokens.push(tokens[place]);
      if (request.tokens.length >= request.longest || this.stops.has(tokens[place])) this.finish(request);
    });
  }

  /** Its blocks may be granted in the very step that says so. */
  finish(request) {
    this.free.push(...request.blocks);
    this.toFinish.push(request.id);
    request.state = "finished";
    this.requests.splice(this.requests.indexOf(request), 1);
  }
}
