// SPDX-License-Identifier: MIT OR Apache-2.0
// Tables of the selected span.

// Tables: rows of cells, sorted by the selected heading. Returns the rows beyond the first `maxRows`.

function fill(table, key, rows, maxRows) {
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
  const beyond = maxRows === undefined ? [] : rows.splice(maxRows), elements = [];
  for (const row of rows) {
    elements.push(element("tr", row.kind ? { class: row.kind } : {}, row.cells.map(cell)));
    if (row.opened) elements.push(row.opened());
  }
  table.tBodies[0].replaceChildren(...elements);
  if (!table.dataset.sortable) {
    table.dataset.sortable = "yes";
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const text = heading.textContent;
      heading.replaceChildren(button(text, {}, () => {
        const last = state.sorts[key];
        const startsUp = !rows.some((row) => typeof row.cells[column].v === "number");
        state.sorts[key] = { column, up: last && last.column === column ? !last.up : startsUp };
        show();
      }));
    });
  }
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    if (sort && sort.column === column) heading.setAttribute("aria-sort", sort.up ? "ascending" : "descending");
    else heading.removeAttribute("aria-sort");
  });
  return beyond;

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
  const all = data.sources.map(sourceInSpan).filter((of) => of !== null);
  all.sort((a, b) => b.isLate - a.isLate || b.lateNs - a.lateNs);
  fill(byId("sources"), "sources", all.flatMap(verdictRows));
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
  const all = data.culprits.map((culprit, index) => Object.assign({ culprit, index }, delays(culprit))).filter((of) => of.total > 0);
  all.sort((a, b) => b.total - a.total || b.events - a.events || a.culprit.rank - b.culprit.rank);
  const others = data.others.filter(([slot]) => inSpan(slot)).reduce((sum, [, ns]) => sum + ns, 0);
  const whole = all.reduce((sum, of) => sum + of.total, others);
  byId("delay").textContent = formatNs(whole);
  byId("delay").dataset.v = whole;
  const rows = all.map((of) => {
    const { culprit, index, total, victims } = of, share = total / Math.max(whole, 1);
    const isSelected = state.culprit === index;
    const select = button(culprit.who, { class: "choose", "aria-pressed": String(isSelected), title: "Show only what it had a part in" }, () => {
      state.culprit = isSelected ? -1 : index;
      show();
      const focused = table.querySelector("button[aria-pressed=true]");
      if (focused) focused.focus();
    });
    const texts = victims.map((of) => of.source + " " + times(of.events) + " by " + formatNs(of.total) + " (worst " + formatNs(of.worst) + ")");
    const cgroup = culprit.cgroup ? [" ", element("small", {}, [culprit.cgroup])] : [];
    const cells = [cellShare(share), cellNs(total), { bar: share, v: share }, cellText(culprit.word),
      { t: culprit.who, v: culprit.who, nodes: [select, ...cgroup] }, cellText(texts.join(", "))];
    return { cells, kind: isSelected ? "chosen" : "", total };
  });
  const isShown = (row) => row.kind !== "" || row.total / Math.max(whole, 1) >= SMALL_PART;
  const small = rows.filter((row) => !isShown(row));
  const beyond = [...fill(table, "culprits", rows.filter(isShown), MAX_CULPRITS), ...small];
  const more = byId("more-culprits");
  if (more) {
    const ns = beyond.reduce((sum, of) => sum + of.total, others);
    // The number of others in a part of the span is unknown.
    const who = others === 0 ? pluralize(beyond.length, "other") : isWhole() ? pluralize(beyond.length + data.others_count, "other") : "Others";
    more.textContent = ns === 0 ? "" : who + " caused " + formatNs(ns) + " more.";
  }
}

// Late events.

function lateTable() {
  const table = byId("late");
  if (!table) return;
  const isOf = (late) => state.culprit < 0 || late.causes.some(([culprit]) => culprit === state.culprit);
  const all = data.late.map((late, index) => ({ late, index })).filter(({ late }) => inSpan(late.slot) && isOf(late));
  const rows = all.map(({ late, index }) => {
    const [day, clock] = local(late.at), isOpen = state.open.has(index);
    const time = data.has_dates ? day.slice(5) + " " + clock : clock;
    const open = button((isOpen ? "▾ " : "▸ ") + time, { class: "open", "aria-expanded": String(isOpen) }, () => {
      if (!state.open.delete(index)) state.open.add(index);
      lateTable();
      const focused = table.querySelector("[data-late=\"" + index + "\"]");
      if (focused) focused.focus();
    });
    open.dataset.late = index;
    const cells = [{ t: time, v: late.at, nodes: [open] }, cellText(data.sources[late.source].name), cellNs(late.ns),
      cellText(late.who || "-"), cellCount(late.cpu), cellText(late.main)];
    return { cells, kind: "", opened: isOpen ? () => details(late) : null };
  });
  const beyond = fill(table, "late", rows, state.showsAll ? undefined : MAX_ROWS);
  const texts = [state.culprit >= 0
    ? "Only events that " + data.culprits[state.culprit].name + " had a part in: " + all.length + "."
    : pluralize(all.length, "late event") + " can be opened here."];
  if (beyond.length > 0) texts.push("The first " + rows.length + " are shown.");
  const note = byId("how-many");
  const prefix = note.dataset.kept === undefined ? (note.dataset.kept = note.textContent.replace(/Without scripts.*/, "")) : note.dataset.kept;
  note.replaceChildren(prefix + texts.join(" "));
  if (beyond.length > 0) {
    note.append(" ", button("Show all " + all.length, { id: "show-all" }, () => {
      state.showsAll = true;
      lateTable();
    }));
  }
  if (state.culprit >= 0) {
    note.append(" ", button("Show events of all culprits", { id: "unfilter" }, () => {
      state.culprit = -1;
      show();
    }));
  }
}

function details(late) {
  const children = [];
  if (late.parts.length > 0) {
    children.push(element("h4", {}, [late.in_order ? "In order of time" : "Sums, not in order of time"]), pathPicture(late));
    children.push(element("ol", { class: "parts" }, late.parts.map(([ns, kind, text]) =>
      element("li", {}, [swatch("k-" + kind), " ", element("b", {}, [formatNs(ns)]), " " + text]))));
  }
  if (late.in_order && late.causes.length > 0) {
    const head = ["Share", "Time", "How", "Who"].map((text, index) => element("th", index < 2 ? { scope: "col", class: "n" } : { scope: "col" }, [text]));
    const rows = late.causes.map(([, word, who, ns]) => element("tr", {}, [
      element("td", { class: "n" }, [percent(ns / Math.max(late.ns, 1))]), element("td", { class: "n", "data-v": ns }, [formatNs(ns)]),
      element("td", {}, [word]), element("td", {}, [who])]));
    children.push(element("h4", {}, ["Causes, summed up"]), element("table", { class: "causes" },
      [element("thead", {}, [element("tr", {}, head)]), element("tbody", {}, rows)]));
  }
  if (late.facts.length > 0) {
    children.push(element("dl", { class: "facts" }, late.facts.map(([what, value]) =>
      element("div", {}, [element("dt", {}, [what]), element("dd", {}, [value])]))));
  }
  for (const [owner, frames] of late.stacks) {
    const list = element("ol", { class: "frames" }, frames.map((frame) => element("li", {}, [data.names[frame]])));
    children.push(element("details", { open: "" }, [element("summary", {}, [owner]), list]));
  }
  return element("tr", { class: "more" }, [element("td", { colspan: "6" }, children)]);
}

function pathPicture(late) {
  const paths = [];
  let startNs = 0;
  for (const [ns, kind, text] of late.parts) {
    const x = Math.floor((startNs / late.ns) * WIDTH);
    startNs += ns;
    const width = Math.max(Math.floor((startNs / late.ns) * WIDTH) - x, 1);
    const path = picture("path", { class: "k-" + kind, d: "M" + x + " 0h" + width + "v10h-" + width + "z" },
      [picture("title", {}, [formatNs(ns) + " " + text])]);
    paths.push(path);
  }
  return picture("svg", { class: "path", viewBox: "0 0 " + WIDTH + " 10", preserveAspectRatio: "none", role: "img",
    "aria-label": "The parts of its time; the list below names each" }, paths);
}
