// The workflows that an event starts.

import { InputError } from "./files.mjs";

// The activities that start a workflow without `types`. Other events start for any activity.
const DEFAULT_TYPES = {
  pull_request: ["opened", "synchronize", "reopened"],
  pull_request_target: ["opened", "synchronize", "reopened"],
};

/**
 * Checks that the event of the case `given` starts the workflow `file`.
 *
 * events: the value of `on` of the workflow.
 */
export function isStarted(file, events, given) {
  const { event_name: name, event } = given;
  if (!Object.hasOwn(events, name) || name === "workflow_call") {
    return false;
  }
  const filters = events[name];
  if (name === "schedule") {
    return filters.some(({ cron }) => cron === event.schedule);
  }
  if (name === "workflow_dispatch") {
    return event.workflow === `.github/workflows/${file}`;
  }
  const types = filters.types ?? DEFAULT_TYPES[name];
  if (types && event.action === undefined) {
    throw new InputError(`${given.name}: the payload of ${name} lacks its action`);
  }
  if (types && !types.includes(event.action)) {
    return false;
  }
  if (name === "push") {
    return isPushStarting(file, filters, given);
  }
  if (name === "workflow_run" && !(filters.workflows ?? []).includes(event.workflow_run?.name)) {
    return false;
  }
  const branch = branchOf(name, event);
  return isAmong(branch, filters, "branches") && arePathsAmong(file, filters, given);
}

/** Returns the branch that `branches` filters, usually the target of a merge. */
function branchOf(name, event) {
  return {
    pull_request: event.pull_request?.base?.ref,
    pull_request_target: event.pull_request?.base?.ref,
    merge_group: event.merge_group?.base_ref?.replace(/^refs\/heads\//, ""),
    workflow_run: event.workflow_run?.head_branch,
  }[name];
}

function isPushStarting(file, filters, given) {
  const ref = given.event.ref ?? given.github.ref;
  const [, kind, name] = /^refs\/(heads|tags)\/(.+)$/s.exec(ref) ?? [];
  if (!kind) {
    throw new InputError(
      `${given.name}: a push has a ref of refs/heads/ or refs/tags/, not ${ref}`,
    );
  }
  const [own, other] = kind === "tags" ? ["tags", "branches"] : ["branches", "tags"];
  // A workflow that filters only branches does not start for tags, and vice versa.
  if (!hasFilter(filters, own) && hasFilter(filters, other)) {
    return false;
  }
  // GitHub does not filter tags by paths.
  return isAmong(name, filters, own) && (kind === "tags" || arePathsAmong(file, filters, given));
}

function hasFilter(filters, key) {
  return key in filters || `${key}-ignore` in filters;
}

function isAmong(name, filters, key) {
  if (!hasFilter(filters, key)) {
    return true;
  }
  if (name === undefined) {
    throw new InputError(`the payload lacks what ${key} filters`);
  }
  return key in filters
    ? isMatched(name, filters[key])
    : !isMatched(name, filters[`${key}-ignore`]);
}

function arePathsAmong(file, filters, given) {
  if (!hasFilter(filters, "paths")) {
    return true;
  }
  if (!given.changed) {
    throw new InputError(`${given.name}: ${file} filters paths, and "changed" is not given`);
  }
  return given.changed.some((path) => isAmong(path, filters, "paths"));
}

/** The last matching pattern decides. A leading ! excludes. */
function isMatched(name, patterns) {
  return patterns.reduce((matched, pattern) => {
    const takesOut = pattern.startsWith("!");
    return toRegExp(takesOut ? pattern.slice(1) : pattern).test(name) ? !takesOut : matched;
  }, false);
}

/** Unlike in a shell, `?` and `+` repeat the preceding character. */
function toRegExp(pattern) {
  const parts = { "**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "?", "+": "+" };
  const source = pattern.replace(
    /\\(.)|(\*\*\/|\*\*|\*|\?|\+)|(\[[^\]]*\])|([^])/g,
    (_, escaped, wildcard, range, literal) =>
      parts[wildcard] ?? range ?? (escaped ?? literal).replace(/[.*+?^${}()|[\]\\/-]/, "\\$&"),
  );
  return new RegExp(`^${source}$`, "s");
}
