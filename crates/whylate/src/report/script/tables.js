// SPDX-License-Identifier: MIT OR Apache-2.0
// Tables of the span.

// Tables: rows of cells, sorted by whatever heading was chosen. Returns those that are beyond the first so many.

function fill(table, key, rows, most) {
  if (!table) return [];
  const sort = state.sorts[key];
  if (sort) {
    const value = (row) => row.cells[sort.column].v;
    rows.sort((a, b) => {
      const one = value(a), other = value(b);
      if (one === null || other === null) return (one === null) - (other === null);
      const order = typeof one === "number" && typeof other === "number" ? one - other
        : String(one).localeCompare(String(other), "en", { numeric: true });
      return sort.up ? order : -order;
    });
  }
  const rest = most === undefined ? [] : rows.splice(most), made = [];
  for (const row of rows) {
    made.push(element("tr", row.kind ? { class: row.kind } : {}, row.cells.map(cell)));
    if (row.opened) made.push(row.opened());
  }
  table.tBodies[0].replaceChildren(...made);
  if (!table.dataset.sortable) {
    table.dataset.sortable = "yes";
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const text = heading.textContent;
      heading.replaceChildren(button(text, {}, () => {
        const was = state.sorts[key];
        const startsUp = !rows.some((row) => typeof row.cells[column].v === "number");
        state.sorts[key] = { column, up: was && was.column === column ? !was.up : startsUp };
        show();
      }));
    });
  }
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    if (sort && sort.column === column) heading.setAttribute("aria-sort", sort.up ? "ascending" : "descending");
    else heading.removeAttribute("aria-sort");
  });
  return rest;

  function cell(of) {
    const attributes = of.n ? { class: "n" } : of.bar !== undefined ? { class: "bar" } : {};
    if (of.v !== null && of.v !== undefined) attributes["data-v"] = of.v;
    return element("td", attributes, of.nodes || (of.bar !== undefined ? [bar(of.bar)] : [of.t]));
  }
  function bar(share) {
    const length = Math.round(Math.min(Math.max(share, 0), 1) * 1000);
    const path = picture("path", { d: "M0 0h" + length + "v10h-" + length + "z" });
    return picture("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, [path]);
  }
}

function sourcesTable() {
  const all = data.sources.map(found).filter((of) => of !== null);
  all.sort((a, b) => b.isLate - a.isLate || b.lateNs - a.lateNs);
  fill(byId("sources"), "sources", all.flatMap(judged));
}

function delays(culprit) {
  const victims = culprit.by.map(([source, delays]) => {
    const sum = { source, events: 0, total: 0, worst: 0 };
    for (const [slot, events, total, worst] of delays) {
      if (!inSpan(slot)) continue;
      sum.events += events;
      sum.total += total;
      sum.worst = Math.max(sum.worst, worst);
    }
    return sum;
  }).filter((of) => of.total > 0);
  victims.sort((a, b) => b.total - a.total);
  const sum = (of) => victims.reduce((all, victim) => all + of(victim), 0);
  return { victims, total: sum((of) => of.total), events: sum((of) => of.events) };
}

function culpritsTable() {
  const table = byId("culprits");
  if (!table) return;
  const all = data.culprits.map((culprit, at) => Object.assign({ culprit, at }, delays(culprit))).filter((of) => of.total > 0);
  all.sort((a, b) => b.total - a.total || b.events - a.events || a.culprit.rank - b.culprit.rank);
  const others = data.others.filter(([slot]) => inSpan(slot)).reduce((sum, [, ns]) => sum + ns, 0);
  const whole = all.reduce((sum, of) => sum + of.total, others);
  byId("delay").textContent = formatNs(whole);
  byId("delay").dataset.v = whole;
  const left = fill(table, "culprits", all.map((of) => {
    const { culprit, at, total, victims } = of, share = total / Math.max(whole, 1);
    const isChosen = state.culprit === at;
    const choose = button(culprit.who, { class: "choose", "aria-pressed": String(isChosen), title: "Show only what it had a part in" }, () => {
      state.culprit = isChosen ? -1 : at;
      show();
      const again = table.querySelector("button[aria-pressed=true]");
      if (again) again.focus();
    });
    const told = victims.map((of) => of.source + " " + times(of.events) + " by " + formatNs(of.total) + " (worst " + formatNs(of.worst) + ")");
    const cgroup = culprit.cgroup ? [" ", element("small", {}, [culprit.cgroup])] : [];
    const cells = [cellShare(share), cellNs(total), { bar: share, v: share }, cellText(culprit.word),
      { t: culprit.who, v: culprit.who, nodes: [choose, ...cgroup] }, cellText(told.join(", "))];
    return { cells, kind: isChosen ? "chosen" : "", total };
  }), MOST_CULPRITS);
  const more = byId("more-culprits");
  if (more) {
    const ns = left.reduce((sum, of) => sum + of.total, others);
    // How many the others of a part are is not known.
    const who = others === 0 ? counted(left.length, "other") : isWhole() ? counted(left.length + data.others_count, "other") : "Others";
    more.textContent = ns === 0 ? "" : who + " caused " + formatNs(ns) + " more.";
  }
}

// Late events.

function lateTable() {
  const table = byId("late");
  if (!table) return;
  const isOf = (late) => state.culprit < 0 || late.causes.some(([culprit]) => culprit === state.culprit);
  const all = data.late.map((late, at) => ({ late, at })).filter(({ late }) => inSpan(late.slot) && isOf(late));
  const rows = all.map(({ late, at }) => {
    const [day, clock] = local(late.at), isOpen = state.open.has(at);
    const time = data.has_dates ? day.slice(5) + " " + clock : clock;
    const open = button((isOpen ? "▾ " : "▸ ") + time, { class: "open", "aria-expanded": String(isOpen) }, () => {
      if (!state.open.delete(at)) state.open.add(at);
      lateTable();
      const again = table.querySelector("[data-late=\"" + at + "\"]");
      if (again) again.focus();
    });
    open.dataset.late = at;
    const cells = [{ t: time, v: late.at, nodes: [open] }, cellText(data.sources[late.source].name), cellNs(late.ns),
      cellText(late.who || "-"), cellCount(late.cpu), cellText(late.main)];
    return { cells, kind: "", opened: isOpen ? () => details(late) : null };
  });
  const rest = fill(table, "late", rows, state.showsAll ? undefined : MOST_ROWS);
  const told = [state.culprit >= 0
    ? "Only events that " + data.culprits[state.culprit].told + " had a part in: " + all.length + "."
    : counted(all.length, "late event") + " can be opened here."];
  if (rest.length > 0) told.push("The first " + rows.length + " are shown.");
  const how = byId("how-many");
  const kept = how.dataset.kept === undefined ? (how.dataset.kept = how.textContent.replace(/Without scripts.*/, "")) : how.dataset.kept;
  how.replaceChildren(kept + told.join(" "));
  if (rest.length > 0) {
    how.append(" ", button("Show all " + all.length, { id: "show-all" }, () => {
      state.showsAll = true;
      lateTable();
    }));
  }
  if (state.culprit >= 0) {
    how.append(" ", button("Show events of all culprits", { id: "unfilter" }, () => {
      state.culprit = -1;
      show();
    }));
  }
}

function details(late) {
  const inside = [];
  if (late.parts.length > 0) {
    inside.push(element("h4", {}, [late.in_order ? "In order of time" : "Sums, not in order of time"]), pathPicture(late));
    inside.push(element("ol", { class: "parts" }, late.parts.map(([ns, kind, text]) =>
      element("li", {}, [swatch("k-" + kind), " ", element("b", {}, [formatNs(ns)]), " " + text]))));
  }
  if (late.in_order && late.causes.length > 0) {
    const head = ["Share", "Time", "How", "Who"].map((text, at) => element("th", at < 2 ? { scope: "col", class: "n" } : { scope: "col" }, [text]));
    const rows = late.causes.map(([, word, who, ns]) => element("tr", {}, [
      element("td", { class: "n" }, [percent(ns / Math.max(late.ns, 1))]), element("td", { class: "n", "data-v": ns }, [formatNs(ns)]),
      element("td", {}, [word]), element("td", {}, [who])]));
    inside.push(element("h4", {}, ["Causes, summed up"]), element("table", { class: "causes" },
      [element("thead", {}, [element("tr", {}, head)]), element("tbody", {}, rows)]));
  }
  if (late.facts.length > 0) {
    inside.push(element("dl", { class: "facts" }, late.facts.map(([what, value]) =>
      element("div", {}, [element("dt", {}, [what]), element("dd", {}, [value])]))));
  }
  for (const [whose, frames] of late.stacks) {
    const list = element("ol", { class: "frames" }, frames.map((frame) => element("li", {}, [data.names[frame]])));
    inside.push(element("details", { open: "" }, [element("summary", {}, [whose]), list]));
  }
  return element("tr", { class: "more" }, [element("td", { colspan: "6" }, inside)]);
}

function pathPicture(late) {
  const paths = [];
  let at = 0;
  for (const [ns, kind, text] of late.parts) {
    const x = Math.floor((at / late.ns) * WIDTH);
    at += ns;
    const width = Math.max(Math.floor((at / late.ns) * WIDTH) - x, 1);
    const path = picture("path", { class: "k-" + kind, d: "M" + x + " 0h" + width + "v10h-" + width + "z" },
      [picture("title", {}, [formatNs(ns) + " " + text])]);
    paths.push(path);
  }
  return picture("svg", { class: "path", viewBox: "0 0 " + WIDTH + " 10", preserveAspectRatio: "none", role: "img",
    "aria-label": "The parts of its time; the list below tells each in words" }, paths);
}
