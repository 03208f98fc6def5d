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
  const { types = DEFAULT_TYPES[name], ...filters } = events[name];
  if (name === "push") {
    return isPushed(file, filters, event.ref);
  }
  refuse(file, Object.keys(filters));
  return types === undefined || types.includes(event.action);
}

function isPushed(file, { branches, tags, ...others }, ref) {
  const patterns = [...(branches ?? []), ...(tags ?? [])];
  refuse(file, [...Object.keys(others), ...patterns.filter((one) => !/^[\w./-]+\*?$/.test(one))]);
  const [, kind, name] = /^refs\/(heads|tags)\/(.+)$/s.exec(ref);
  return (
    patterns.length === 0 ||
    ((kind === "heads" ? branches : tags) ?? []).some((pattern) =>
      pattern.endsWith("*")
        ? name.startsWith(pattern.slice(0, -1)) && !name.slice(pattern.length - 1).includes("/")
        : name === pattern,
    )
  );
}

function refuse(file, filters) {
  if (filters.length > 0) {
    throw new InputError(`${file} filters by ${filters.join(", ")}, which is not evaluated`);
  }
}
