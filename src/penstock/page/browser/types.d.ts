// Made by `python -m tests.frontend.page_types`; a test fails when it is stale.

export type AlarmReport = {
  at: number;
  reason: Reason;
};

export type Axis = {
  label?: string;
  unit?: "count" | "hours" | "rate" | "seconds" | "share" | "time";
  log?: boolean;
};

export type CanaryStatus = {
  sent: number;
  missed: number;
  verdict: string | null;
  wall_s: number | null;
};

export type Chart = {
  title: string;
  series: Series[];
  about?: string;
  x?: Axis;
  y?: Axis;
  kind?: "bars" | "lanes" | "lines";
  names?: string[];
  band?: [number, number] | null;
  marks?: Mark[];
  notes?: ChartNote[];
  csv?: string;
  empty?: string;
};

export type ChartNote = {
  at: number;
  text: string;
  until?: number | null;
  link?: string;
};

export type ClusterStatus = {
  cluster: string;
  version: string;
  run: string;
  endpoint: string;
  uptime: number;
  draining: boolean;
  mode: string;
  models: ModelStatus[];
  workers: WorkerStatus[];
  queue: {[name: string]: QueueStatus};
  requests: StatusCounts;
  hit_rate: number | null;
  crashes: CrashStatus[];
  findings: StatusFinding[];
  frontends: string[];
  planner: PlannerReport | null;
  tokenizers: {[name: string]: TokenizerStatus};
  loop: LoopStatus;
  router_faults: number;
  pools?: DesiredPool[];
  names?: NameStatus[];
  adapters?: WantedAdapter[];
  programs?: ProgramStatus[];
  last_minute: LastMinute;
};

export type Column = {
  name: string;
  kind?: "long" | "number" | "text";
};

export type Cost = {
  target: Target;
  unit: "blocks" | "ms";
  total: number;
  prefill: number;
  decode: number;
  queue: number;
  transfer: number;
  overlap_blocks: number;
  overlap_tokens: number;
  active_requests: number;
  active_prefill_tokens: number;
  active_blocks: number;
  costly_blocks?: number;
  adapter?: number;
  discount?: number;
  index?: "approximate" | "exact" | "none" | "predicted";
  plugins?: {[name: string]: number};
};

export type CrashStatus = {
  name: string;
  kind: "engine" | "frontend" | "planner" | "server" | "supervisor" | "tiers";
  count: number;
  reason: string;
  at: number;
};

export type Decision = {
  request: string;
  attempt: number;
  at: number;
  model: string;
  mode: string;
  chosen: Target;
  reason: string;
  isl: number;
  blocks: number;
  queued: number;
  candidates: Cost[];
  excluded?: Excluded[];
  left_out?: number;
  table?: string;
  expected_cached_tokens?: number;
  resumed?: number;
  temperature?: number;
  stage?: "aggregated" | "decode" | "encode" | "prefill";
  again?: boolean;
  flow?: string;
  adapter?: string;
};

export type DecisionList_Decision_ = {
  decisions: Decision[];
};

export type DesiredPool = {
  model: string;
  role?: "aggregated" | "decode" | "encode" | "prefill";
  variant?: string;
  gpus?: number;
  desired: number;
  acknowledged?: boolean;
  limit?: number | null;
  problem?: string | null;
  replicas?: Replica[] | null;
  name: string;
  kind: "process" | "urls";
  revision: string | null;
  ready: number;
};

export type EndedLeg = {
  role: string;
  target: Target | string;
  dispatched: number;
  first?: number | null;
  last?: number | null;
  failure?: string | null;
};

export type Excluded = {
  target: Target;
  reason: string;
  others?: number;
};

export type Explanation_Decision_ = {
  request: RequestEnd | null;
  decisions: Decision[];
};

export type Flip = {
  model: string;
  frm: "aggregated" | "decode" | "encode" | "prefill";
  to: "aggregated" | "decode" | "encode" | "prefill";
  count?: number;
};

export type KeyFigure = {
  name: string;
  value: string;
  note?: string;
};

export type KvEventsStatus = {
  applied: number;
  gaps: number;
  lost: number;
};

export type LastMinute = {
  ended: number;
  ttft_p50: number | null;
  ttft_p95: number | null;
  ttft_p99: number | null;
  itl_p50: number | null;
  itl_p95: number | null;
  itl_p99: number | null;
};

export type LoadsView = {
  at: number;
  workers: {[name: string]: WorkerLoad} | null;
};

export type LoopStatus = {
  longest: number | null;
  recent: number | null;
};

export type Mark = {
  name: string;
  at: number;
  axis: "x" | "y";
};

export type ModelStatus = {
  name: string;
  block_size?: number | null;
  max_model_len?: number | null;
  ready?: boolean;
  workers?: number;
  index?: "approximate" | "exact" | "mixed" | "off";
  index_pairs?: number | null;
  hit_rate?: number | null;
  inflight?: number;
  tokenizer?: string | null;
  roles?: {[name: string]: number};
  handoff?: "bootstrap" | "completed" | "push" | null;
  handoffs?: {[name: string]: number} | null;
  media?: {[name: string]: number} | null;
  embedding_bytes?: number;
  awaited?: {[name: string]: number};
  refused?: {[name: string]: number};
  adapters?: {[name: string]: number};
  ok?: number;
  rejected?: number;
  failed?: number;
  cancelled?: number;
  expired?: number;
};

export type ModelTick = {
  health: string;
  why?: string;
  rate?: number | null;
  shape?: RequestShape_float___None_;
  ttft?: number | null;
  itl?: number | null;
  judged?: number;
  in_slo?: number;
  queued?: number | null;
  predicted?: any;
};

export type NameStatus = {
  name: string;
  weights: {[name: string]: number};
  requests: {[name: string]: number};
  shadows?: ShadowStatus[];
};

export type Page = {
  title: string;
  about: string;
  sections: Section[];
  notes?: PageNote[];
  figures?: KeyFigure[];
};

export type PageNote = {
  level: "error" | "info" | "warning";
  text: string;
  hint?: string;
};

export type PlannerDecisions_TickRecord_ = {
  planner: PlannerReport | null;
  last: TickRecord | null;
  decisions: TickRecord[];
};

export type PlannerReport = {
  version?: number;
  policy: string;
  advisory: boolean;
  source: string;
  connector: string;
  pid: number;
  at: number;
  wall: number;
  every: number;
  tick: number;
  outcome: string;
  pools: {[name: string]: PoolTick};
  health: {[name: string]: string};
  unread?: {[name: string]: string};
  plugins?: {[name: string]: string};
  reason?: Reason[];
  why?: string;
  changed?: number | null;
  bound?: Reason[];
  alarms?: AlarmReport[];
  gpus?: number;
  restarts?: number;
  attainment?: number | null;
};

export type PluginResult = {
  id: string;
  stage: string;
  result: string;
  targets?: {[name: string]: number};
  reasons?: Reason[];
};

export type PoolTick = {
  ready: number;
  starting: number;
  draining: number;
  failed: number;
  desired: number;
  proposed: number;
  target: number;
  gpus: number;
  given_up?: number;
  asleep?: number;
  host_memory?: number | null;
  model?: string;
  role?: string;
  why?: string;
};

export type ProgramStatus = {
  name: string;
  model: string;
  requests?: number;
  failed?: number;
  prompt_tokens?: number;
  counted_tokens?: number;
  cached_tokens?: number;
  output_tokens?: number;
  sessions?: string[];
  more_sessions?: boolean;
  workers?: {[name: string]: number};
  last?: number;
};

export type QueueStatus = {
  length: number;
};

export type Reason = {
  code: string;
  text: string;
  facts?: any;
  pools?: string[];
};

export type RecordedColumns = {
  width: number;
  first: number;
  columns: {[name: string]: (number | null)[]};
  card: RecordedWorker;
};

export type RecordedWorker = {
  id: string;
  pool: string;
  kv_blocks: number | null;
  decisions_for_it: number | null;
  first_seen_s: number | null;
  last_seen_s: number | null;
};

export type Replica = {
  id: string;
  state: "draining" | "failed" | "ready" | "starting" | "stopping";
  reason?: string | null;
  pid?: number | null;
  gpus?: number[];
  role?: "aggregated" | "decode" | "encode" | "prefill" | null;
  start?: StartRecord | null;
  asleep?: boolean;
  host_memory?: number | null;
  outdated?: string | null;
};

export type RequestEnd = {
  id: string;
  model: string;
  outcome: "cancelled" | "expired" | "failed" | "ok" | "rejected" | "unsent";
  fault: "client" | "deadline" | "engine" | "none" | "overloaded";
  status: number | null;
  reason: string;
  arrived: number;
  closed: number | null;
  isl: number | null;
  osl?: number;
  cached?: number | null;
  expected_cached?: number | null;
  queued?: number | null;
  first?: number | null;
  attempts?: number | null;
  migrations?: number;
  legs?: EndedLeg[];
  retry_after?: number | null;
  session?: string | null;
  program?: string | null;
  ignored_hints?: string[];
  next_turn?: string;
  way?: string;
  name?: string | null;
  copy_of?: string | null;
};

export type RequestList = {
  requests: RequestEnd[];
};

export type RequestShape_float___None_ = {
  isl: number | null;
  osl: number | null;
  hit_rate?: number | null;
  accept_length?: number | null;
};

export type Row = {
  cells: string[];
  id?: string;
  chosen?: boolean;
  more?: Table | null;
};

export type RunEvent = {
  wall: number;
  text: string;
  bad: boolean;
};

export type Section = {
  heading: string;
  text?: string[];
  charts?: Chart[];
  tables?: Table[];
  shared?: boolean;
  zoom?: [number, number] | null;
  files?: string[];
};

export type Series = {
  name: string;
  at: number[];
  values: (number | null)[];
  drawn?: "hidden" | "line" | "points" | "spans" | "steps";
  colour?: "" | "bad" | "good" | "s0" | "s1" | "s2" | "s3" | "s4" | "s5" | "warn";
  limit?: boolean;
};

export type ShadowStatus = {
  model: string;
  share: number;
  same?: number;
  different?: number;
  failed?: number;
  skipped?: number;
  seconds?: number | null;
  answered_seconds?: number | null;
};

export type StartRecord = {
  seconds: number;
  phases: {[name: string]: number | null};
  woken?: boolean;
};

export type StatusCounts = {
  inflight?: number;
  total?: number;
  ok?: number;
  failed?: number;
  rejected?: number;
  cancelled?: number;
  expired?: number;
  http_inflight?: number;
};

export type StatusFinding = {
  level: "error" | "info" | "warning";
  text: string;
  hint: string;
};

export type StepsStatus = {
  source: string;
  wall_window_s: number;
  wall_age_s: number;
  wall_passes: number | null;
  wall_pass_ms: number | null;
  wall_prefill_tokens_per_s: number | null;
  wall_decode_tokens_per_s: number | null;
  wall_decode_seqs: number | null;
  wall_decode_kv_tokens: number | null;
  wall_queued_requests: number | null;
  wall_queued_prefill_tokens: number | null;
  estimated: string[];
};

export type Table = {
  caption: string;
  head: Column[];
  rows: Row[];
  empty?: string;
  folded?: boolean;
};

export type Target = [string, number];

export type TickRecord = {
  tick: number;
  at: number;
  policy: string;
  outcome: "advise" | "apply" | "blind" | "hold" | "keep" | "timeout" | "veto";
  models?: {[name: string]: ModelTick};
  pools?: {[name: string]: PoolTick};
  plugin_results?: PluginResult[];
  chosen?: Reason[];
  bound?: Reason[];
  alternatives?: Reason[];
  evidence?: any;
  flips?: Flip[];
  gpus?: number;
  late?: number;
};

export type TimelineView = {
  kind: "live" | "recorded";
  name: string;
  run: string;
  zero: number | null;
  now: number;
  width: number;
  kept: number | null;
  first: number;
  columns: {[name: string]: (number | null)[]};
  pools: {[name: string]: {[name: string]: (number | null)[]}};
  frontends: {[name: string]: number};
  events?: RunEvent[];
  notes?: string[];
  decisions?: boolean;
  planner?: boolean;
};

export type TokenizerStatus = {
  caches: boolean;
  hits: number;
  misses: number;
  cache_bytes: number;
  tokens_cached: number;
  tokens_encoded: number;
};

export type WantedAdapter = {
  name: string;
  model: string;
  wanted: number;
  workers: string[];
  loading: string[];
  why?: string;
};

export type WorkerColumns = {
  width: number;
  first: number;
  columns: {[name: string]: (number | null)[]};
};

export type WorkerLoad = {
  requests: number | null;
  prefill_tokens: number | null;
  blocks: number | null;
  kv_blocks: number | null;
  ready: boolean;
};

export type WorkerStatus = {
  id: string;
  model: string;
  role: "aggregated" | "decode" | "encode" | "prefill";
  url: string;
  engine: string;
  state: string;
  why_not: string | null;
  epoch: number;
  pid: number | null;
  since: number;
  index: string;
  active_requests: number;
  active_prefill_tokens: number;
  active_blocks: number;
  kv_blocks: number | null;
  block_size: number | null;
  requests: number;
  failures: number;
  breaker: "closed" | "half_open" | "open";
  kv_events: KvEventsStatus | null;
  paired?: boolean;
  resident_blocks?: number | null;
  stats?: string | null;
  labels?: {[name: string]: string};
  steps?: StepsStatus | null;
  canary?: CanaryStatus | null;
  restarts?: number;
  restart_reason?: string | null;
};
