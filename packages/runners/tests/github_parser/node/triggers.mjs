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
 * Throws: InputError for a filter that none of our workflows has.
 */
export function isStarted(file, events, given) {
  const { event_name: name, event } = given;
  if (!Object.hasOwn(events, name) || name === "workflow_call") {
    return false;
  }
  if (name === "schedule") {
    return events.schedule.some(({ cron }) => cron === event.schedule);
  }
  if (name === "workflow_dispatch") {
    return event.workflow === `.github/workflows/${file}`;
  }
  const { types = DEFAULT_TYPES[name], branches, tags, ...others } = events[name];
  const unknown = [
    ...Object.keys(others),
    ...[...(branches ?? []), ...(tags ?? [])].filter((one) => !/^[\w./-]+\*?$/.test(one)),
  ];
  if (unknown.length > 0) {
    throw new InputError(`${file} filters by ${unknown.join(", ")}, which is not evaluated`);
  }
  return (
    (types === undefined || types.includes(event.action)) &&
    ((branches === undefined && tags === undefined) ||
      matches(branches, /^refs\/heads\/(.+)$/s, refOf(name, event)) ||
      matches(tags, /^refs\/tags\/(.+)$/s, refOf(name, event)))
  );
}

/** Checks that `ref` has the form `kind`, and a name that one of `patterns` matches. */
function matches(patterns = [], kind, ref) {
  const name = kind.exec(ref ?? "")?.[1];
  return patterns.some((pattern) =>
    pattern.endsWith("*")
      ? name?.startsWith(pattern.slice(0, -1)) && !name.slice(pattern.length - 1).includes("/")
      : name === pattern,
  );
}

/** Returns what is pushed, or the target of a merge. */
function refOf(name, event) {
  return {
    push: event.ref,
    merge_group: event.merge_group?.base_ref,
    pull_request: `refs/heads/${event.pull_request?.base?.ref}`,
    pull_request_target: `refs/heads/${event.pull_request?.base?.ref}`,
  }[name];
}
