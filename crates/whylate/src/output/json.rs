// SPDX-License-Identifier: MIT OR Apache-2.0
//! One JSON object a line.

use std::io::{self, Write};

use whylate_model::{LateEvent, Snapshot, Worst};

use super::Output;

/// How many late events one line carries at most, so that memory stays bounded; the others are counted as lost.
const LATE_EVENTS_A_LINE: usize = 4_000;

/// Each snapshot on a line of its own, with the late events that came before it.
#[derive(Debug, Default)]
pub struct JsonLines {
    late: Vec<LateEvent>,
    beyond_limit: u64,
    /// Where only the worst of the explained events are asked for; the others are not lost then.
    worst: Option<Worst>,
}

impl JsonLines {
    /// Of the late events with causes, each line carries only the `worst` ones, worst first, if there is such a limit.
    pub fn new(worst: Option<usize>) -> Self {
        JsonLines { worst: worst.map(Worst::new), ..JsonLines::default() }
    }
}

impl Output for JsonLines {
    fn begin(&mut self, _out: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }

    fn late(&mut self, _out: &mut dyn Write, event: LateEvent) -> io::Result<()> {
        if let Some(worst) = self.worst.as_mut().filter(|_| !event.causes.is_empty()) {
            worst.add(event);
        } else if self.late.len() < LATE_EVENTS_A_LINE {
            self.late.push(event);
        } else {
            self.beyond_limit += 1;
        }
        Ok(())
    }

    fn snapshot(&mut self, out: &mut dyn Write, mut snapshot: Snapshot) -> io::Result<()> {
        snapshot.late.append(&mut self.late);
        snapshot.late.extend(self.worst.iter_mut().flat_map(Worst::take));
        let beyond_limit = std::mem::take(&mut self.beyond_limit);
        if beyond_limit > 0 {
            *snapshot.lost.entry("late_events".to_owned()).or_default() += beyond_limit;
        }
        serde_json::to_writer(&mut *out, &snapshot)?;
        writeln!(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_events_beyond_the_limit_are_counted() {
        let mut output = JsonLines::default();
        let mut out = Vec::new();
        for _ in 0..LATE_EVENTS_A_LINE + 3 {
            output.late(&mut out, LateEvent::default()).expect("nothing is written");
        }
        output.snapshot(&mut out, Snapshot::new("wq", "fentry", "host", 0)).expect("a vector takes everything");
        let printed: Snapshot = serde_json::from_slice(&out).expect("a snapshot");
        assert_eq!((printed.late.len(), printed.lost["late_events"]), (LATE_EVENTS_A_LINE, 3));
        assert!(output.late.is_empty() && output.beyond_limit == 0);
    }
}
