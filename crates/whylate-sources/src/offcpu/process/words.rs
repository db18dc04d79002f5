// SPDX-License-Identifier: MIT OR Apache-2.0
//! Words of a thread's stack, and the step from a frame to its caller.

use super::super::rules::{BP_KEPT, Rule};
use super::super::skel::types::{offcpu_limits, rule_base};
use super::super::watchdog::Reader;
use crate::kernel::process_memory::ProcessMemory;

/// Error of memory that is unresponsive.
pub(super) struct Unresponsive;

/// The stack memory of a thread, read in chunks of at most a page.
pub(super) struct Words {
    tid: u32,
    /// The last chunk, and its address.
    chunk: Vec<u8>,
    start: u64,
}

/// The smallest page size; larger ones are multiples of it.
const PAGE_BYTES: u64 = offcpu_limits::PAGE_BYTES.0 as u64;

impl Words {
    pub(super) fn new(tid: u32) -> Self {
        Words { tid, chunk: Vec::new(), start: 0 }
    }

    /// Reads a word. `Ok(None)` if the thread has exited, or the page is neither present nor swapped
    /// ([`ProcessMemory`]).
    pub(super) fn word(&mut self, at: u64, reader: &mut Reader) -> Result<Option<u64>, Unresponsive> {
        let known = |words: &Words| {
            let from = usize::try_from(at.checked_sub(words.start)?).ok()?;
            Some(u64::from_ne_bytes(words.chunk.get(from..from.checked_add(8)?)?.try_into().ok()?))
        };
        if let Some(word) = known(self) {
            return Ok(Some(word));
        }
        let tid = self.tid;
        let read = move || {
            let mut chunk = vec![0; (PAGE_BYTES - at % PAGE_BYTES) as usize];
            ProcessMemory::open(tid)?.read_exact_at(&mut chunk, at)?;
            Some(chunk)
        };
        (self.chunk, self.start) = (reader.read(read).ok_or(Unresponsive)?.unwrap_or_default(), at);
        Ok(known(self))
    }
}

/// Returns the caller's instruction, stack and frame pointer. BPF counterpart: `step()`.
pub(super) fn caller_of(
    rule: Rule,
    sp: u64,
    bp: u64,
    mut word: impl FnMut(u64) -> Option<u64>,
) -> Option<(u64, u64, u64)> {
    let from_bp = || bp.checked_add_signed(rule.cfa_offset.into());
    let cfa = match rule.base {
        rule_base::RULE_SP => sp.checked_add_signed(rule.cfa_offset.into())?,
        rule_base::RULE_BP => from_bp()?,
        rule_base::RULE_AT_BP => word(from_bp()?)?,
        rule_base::RULE_CHAIN if bp != 0 => bp.checked_add(16)?,
        _ => return None,
    };
    if cfa <= sp {
        return None;
    }
    let caller = word(cfa.checked_sub(8)?)?;
    let callers_bp = match rule.base {
        rule_base::RULE_CHAIN | rule_base::RULE_AT_BP => word(bp)?,
        _ if rule.bp_offset == BP_KEPT => bp,
        _ => word(cfa.checked_add_signed(rule.bp_offset.into())?)?,
    };
    (caller != 0).then_some((caller, cfa, callers_bp))
}
