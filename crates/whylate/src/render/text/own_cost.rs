// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders what whylate itself costs, as text and as JSON.

use std::io::{self, Write};

use serde_json::{Value, json};
use whylate_model::units::{counted, format_ns, format_span};
use whylate_sources::own_cost::OwnCost;

use crate::terminal::wrapped;

/// Maximum number of events with a separate row.
const ROWS: usize = 15;
/// Width of the note below the table, if the terminal's is unknown.
const NOTE_COLUMNS: usize = 80;

/// Writes a verdict, and a table of events by the run time of their programs.
pub fn write(cost: &OwnCost, columns: Option<usize>, out: &mut impl Write) -> io::Result<()> {
    let OwnCost { elapsed_ns, cpus, cpu_ns, programs, idle_programs, empty_ns, map_bytes, descriptors } = cost;
    let elapsed_ns = (*elapsed_ns).max(1);
    let percent = |ns: u64| ns as f64 * 100.0 / elapsed_ns as f64;
    let per_second = |runs: u64| runs as f64 * 1e9 / elapsed_ns as f64;
    let all_ns = cpu_ns.saturating_add(cost.programs_ns());
    writeln!(
        out,
        "whylate took {:.2}% of this machine's CPU time in {}, with all sources ({})",
        percent(all_ns) / (*cpus).max(1) as f64,
        format_span(elapsed_ns),
        counted(*cpus as u64, "CPU")
    )?;
    let runs = programs.iter().filter(|of| !of.is_own).map(|of| of.runs).sum();
    writeln!(out)?;
    writeln!(out, "process    {:.2}% of a CPU", percent(*cpu_ns))?;
    writeln!(out, "programs   {:.2}% of a CPU, {:.0} runs a second", percent(cost.programs_ns()), per_second(runs))?;
    writeln!(out, "memory     {:.1} MB of BPF maps, {descriptors} descriptors", *map_bytes as f64 / 1e6)?;
    writeln!(out)?;
    writeln!(out, "% of a CPU    runs/s  a run   event")?;
    for of in programs.iter().take(ROWS) {
        let net_ns = of.net_ns(*empty_ns);
        let a_run_ns = net_ns.checked_div(of.runs).unwrap_or(0);
        let event = if of.is_own { format!("{} (in the process)", of.event) } else { of.event.clone() };
        writeln!(out, "{:>10.3}  {:>8.0}  {:<6}  {event}", percent(net_ns), per_second(of.runs), format_ns(a_run_ns))?;
    }
    let rest = programs.get(ROWS..).unwrap_or_default();
    if !rest.is_empty() {
        let net_ns: u64 = rest.iter().map(|of| of.net_ns(*empty_ns)).sum();
        let runs = per_second(rest.iter().map(|of| of.runs).sum());
        let others = counted(rest.len() as u64, "other");
        writeln!(out, "{:>10.3}  {runs:>8.0}          {others}", percent(net_ns))?;
    }
    writeln!(out)?;
    let counting = match empty_ns {
        0 => "The figures include the time for counting, some 50 ns a run.".to_owned(),
        ns => format!("The figures exclude the time for counting: {ns} ns a run, measured with an empty program."),
    };
    let note = format!(
        "{counting} {} did not run. Besides the run time of its programs, calls and cache misses slow an event down.",
        counted(*idle_programs as u64, "program")
    );
    for line in wrapped(&note, columns.unwrap_or(NOTE_COLUMNS)) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// Returns the JSON object.
pub fn object(cost: &OwnCost) -> Value {
    let programs: Vec<Value> = cost
        .programs
        .iter()
        .map(|of| json!({"event": of.event, "runs": of.runs, "run_ns": of.run_ns, "net_ns": of.net_ns(cost.empty_ns), "in_process": of.is_own}))
        .collect();
    json!({
        "schema": 1,
        "duration_ns": cost.elapsed_ns,
        "cpus": cost.cpus,
        "process_cpu_ns": cost.cpu_ns,
        "programs_ns": cost.programs_ns(),
        "counting_ns": cost.empty_ns,
        "map_bytes": cost.map_bytes,
        "descriptors": cost.descriptors,
        "idle_programs": cost.idle_programs,
        "programs": programs,
    })
}

#[cfg(test)]
mod tests {
    use whylate_sources::own_cost::EventCost;

    use super::*;

    #[test]
    fn shares_are_without_the_time_for_counting() {
        let of = |event: &str, runs, run_ns| EventCost {
            event: event.to_owned(),
            runs,
            run_ns,
            is_own: event == "each_thread",
        };
        let cost = OwnCost {
            elapsed_ns: 2_000_000_000,
            cpus: 2,
            cpu_ns: 20_000_000,
            programs: vec![of("sched_switch", 100_000, 15_000_000), of("each_thread", 2_000, 300_000)],
            idle_programs: 1,
            empty_ns: 50,
            map_bytes: 66_000_000,
            descriptors: 250,
        };
        let mut text = Vec::new();
        write(&cost, Some(80), &mut text).expect("memory has room");
        let text = String::from_utf8(text).expect("it is text");
        insta::assert_snapshot!(text, @r"
        whylate took 0.75% of this machine's CPU time in 2.00s, with all sources (2 CPUs)

        process    1.00% of a CPU
        programs   0.50% of a CPU, 50000 runs a second
        memory     66.0 MB of BPF maps, 250 descriptors

        % of a CPU    runs/s  a run   event
             0.500     50000  100ns   sched_switch
             0.010      1000  100ns   each_thread (in the process)

        The figures exclude the time for counting: 50 ns a run, measured with an empty
        program. 1 program did not run. Besides the run time of its programs, calls and
        cache misses slow an event down.
        ");
        assert_eq!(object(&cost)["programs"][0]["net_ns"], 10_000_000);
    }
}
