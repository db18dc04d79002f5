// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recognizes what another tool has recorded, by the head of its text. All importers' formats are told apart here.

use thiserror::Error;

use crate::ftrace::{self, Events, is_section_trace};
use crate::import::{ImportError, Imported, Names};
use crate::paste::{Lines, PasteError};
use crate::text;

/// Number of bytes at the start of a file that [`sniff`] is given.
pub const HEAD_BYTES: u64 = 1 << 20;

/// Content of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Sections with interrupts or preemption disabled, interrupt handlers and hrtimers, for [`ftrace::import`].
    Interrupts,
    /// Context switches, for [`crate::ftrace::timeline::Trace`].
    Switches,
    /// Stacks of threads, for [`Imported`].
    Stacks,
}

/// A recognized text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sniffed {
    /// Content of the text.
    pub content: Content,
    /// Whether a trace of interrupts has context switches as well.
    pub has_switches: bool,
}

/// Why a text is not recognized.
#[derive(Debug, Error)]
pub enum SniffError {
    /// The text cannot be read.
    #[error(transparent)]
    Paste(#[from] PasteError),
    /// No line is of a known format.
    #[error(
        "no line in it is of a known format: give the text output of ftrace (trace, trace_pipe), trace-cmd report, perf \
         script or procstat -ka, of /proc/PID/stack, or folded stacks"
    )]
    Unknown,
}

/// Recognizes a text by its head.
///
/// # Errors
/// Fails if the text is binary, or in no known format.
pub fn sniff(head: &[u8]) -> Result<Sniffed, SniffError> {
    match Lines::new(head, Events, ftrace::LONGEST) {
        Ok(lines) if lines.has_records() => return Ok(of_trace(lines)?),
        Ok(_) => {}
        Err(error) => return Err(error.into()),
    }
    let text = text::read(head).map_err(PasteError::Io)?;
    match Imported::read(&text, Names::Nothing) {
        // Many texts have lines that end in a number.
        Ok(read) if !read.stacks.keys().any(|(_, frames)| frames.len() > 1) => Err(SniffError::Unknown),
        Err(ImportError::UnknownForm) => Err(SniffError::Unknown),
        // The importer says what is wrong with the stacks.
        Ok(_) | Err(_) => Ok(Sniffed { content: Content::Stacks, has_switches: false }),
    }
}

/// Returns which importer reads most of a trace. Interrupt handlers and timers are in traces of both kinds.
fn of_trace(mut lines: Lines<&[u8], Events>) -> Result<Sniffed, PasteError> {
    let (mut has_sections, mut has_interrupts, mut has_switches) = (false, false, false);
    let mut line = String::new();
    while lines.next(&mut line).map_err(PasteError::Io)? {
        let has = |names: &[&str]| names.iter().any(|name| line.contains(name));
        has_sections |=
            is_section_trace(&line) || has(&[" irq_disable:", " irq_enable:", " preempt_disable:", " preempt_enable:"]);
        has_interrupts |= has(&[" irq_handler_", " hrtimer_"]);
        has_switches |= has(&["sched_switch:"]);
    }
    let is_of_interrupts = has_sections || has_interrupts && !has_switches;
    // Without any of these events, the importer of switches says which are needed.
    let content = if is_of_interrupts { Content::Interrupts } else { Content::Switches };
    Ok(Sniffed { content, has_switches })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_no_other_text() {
        let refused = |bytes: &[u8]| sniff(bytes).expect_err("no known format").to_string();
        for text in ["", "\n\n", "Linux version 6.12 #1 SMP 2026\n", "a 1\nb 2\n", "{\"schema\":1}\n", "<svg></svg>\n"]
        {
            assert!(refused(text.as_bytes()).starts_with("no line in it is of a known format"), "{text}");
        }
        for (bytes, what) in [
            (&b"PERFILE2\0\0"[..], "this is a perf.data"),
            (b"\x17\x08\x44tracing6\0\0", "this is a trace.dat"),
            (b"\x1f\x8b\x08\0\0", "decompress it first"),
            (b"\x5e\x2a\x4d\x18\x30\0\0\0whylate1", "this is a recording of whylate"),
            (b"\x7fELF\x02\x01\x01\0\0", "this is not text"),
        ] {
            assert!(refused(bytes).contains(what), "{what}");
        }
    }

    #[test]
    fn trace_of_interrupts_may_have_switches() {
        let events = |names: &[&str]| -> String {
            let line = |name: &&str| format!("job-10 [000] d..2. 5.000000: {name}: x\n");
            names.iter().map(line).collect()
        };
        let of = |names: &[&str]| sniff(events(names).as_bytes()).expect("a trace");
        let found = |content, has_switches| Sniffed { content, has_switches };
        assert_eq!(of(&["sched_switch", "irq_handler_entry", "hrtimer_start"]), found(Content::Switches, true));
        assert_eq!(of(&["irq_handler_exit", "hrtimer_start"]), found(Content::Interrupts, false));
        assert_eq!(of(&["sched_switch", "softirq_entry", "irq_disable"]), found(Content::Interrupts, true));
        assert_eq!(of(&["sys_enter"]), found(Content::Switches, false));
    }
}
