// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of unwind rules, shared with the BPF programs: they claim a slot to request a rule, user space fills it
//! in.

use std::cell::Cell;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::skel::types::{offcpu_limits, rule_base, unwind_rule};
use crate::kernel::mapped::MappedArray;

/// `bp_offset` if the caller's frame pointer is still in its register (`BP_KEPT` in `settings.bpf.h`).
pub(super) const BP_KEPT: i32 = 0x7fff_ffff;
/// Marks the innermost frame: its address is not a return address.
pub(super) const INNERMOST: u64 = 1 << 63;

const IP: usize = std::mem::offset_of!(unwind_rule, ip);
const PROCESS: usize = std::mem::offset_of!(unwind_rule, process);
const BASE: usize = std::mem::offset_of!(unwind_rule, base);
const CFA_OFFSET: usize = std::mem::offset_of!(unwind_rule, cfa_offset);
const BP_OFFSET: usize = std::mem::offset_of!(unwind_rule, bp_offset);

/// `base` of a slot that is free, or has a pending rule.
const UNANSWERED: [rule_base; 3] = [rule_base::RULE_NONE, rule_base::RULE_ASKED, rule_base::RULE_CLAIMED];

/// Rule for unwinding from a frame to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) base: rule_base,
    pub(super) cfa_offset: i32,
    pub(super) bp_offset: i32,
}

impl Rule {
    pub(super) fn plain(base: rule_base) -> Self {
        Rule { base, cfa_offset: 0, bp_offset: BP_KEPT }
    }
}

/// The table. BPF programs read it and claim slots: if switches are traced, at any time and on several CPUs.
pub(super) struct Rules {
    slots: MappedArray,
    /// Number of slots with rules.
    in_use: Cell<usize>,
}

impl Rules {
    pub(super) fn new(slots: MappedArray) -> Self {
        Rules { slots, in_use: Cell::new(0) }
    }

    /// Returns a slot of an address by open addressing. BPF counterpart: `rule_slot()`.
    fn slot(&self, process: u32, ip: u64, probe: u32) -> usize {
        let hash = ((ip ^ u64::from(process) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32;
        (hash.wrapping_add(probe) & (self.slots.entries() as u32 - 1)) as usize
    }

    /// Returns the rule for an address, if there is one.
    pub(super) fn find(&self, process: u32, ip: u64) -> Option<Rule> {
        (0..offcpu_limits::RULE_PROBES.0).map(|probe| self.slot(process, ip, probe)).find_map(|slot| {
            let is_it = self.slots.u64_at(slot, IP).load(Relaxed) == ip
                && self.slots.u32_at(slot, PROCESS).load(Relaxed) == process;
            let base = rule_base(self.slots.u32_at(slot, BASE).load(Relaxed));
            (is_it && !UNANSWERED.contains(&base)).then(|| Rule {
                base,
                cfa_offset: self.slots.u32_at(slot, CFA_OFFSET).load(Relaxed) as i32,
                bp_offset: self.slots.u32_at(slot, BP_OFFSET).load(Relaxed) as i32,
            })
        })
    }

    /// Inserts a rule. If there is no room, the BPF program counts that.
    pub(super) fn insert(&self, process: u32, ip: u64, rule: Rule) {
        for probe in 0..offcpu_limits::RULE_PROBES.0 {
            let slot = self.slot(process, ip, probe);
            let base = self.slots.u32_at(slot, BASE);
            let claim =
                |from: rule_base| base.compare_exchange(from.0, rule_base::RULE_CLAIMED.0, AcqRel, Acquire).is_ok();
            let is_mine = claim(rule_base::RULE_NONE) || {
                let is_it = self.slots.u64_at(slot, IP).load(Relaxed) == ip
                    && self.slots.u32_at(slot, PROCESS).load(Relaxed) == process;
                is_it && claim(rule_base::RULE_ASKED)
            };
            if is_mine {
                self.slots.u64_at(slot, IP).store(ip, Relaxed);
                self.slots.u32_at(slot, PROCESS).store(process, Relaxed);
                self.slots.u32_at(slot, CFA_OFFSET).store(rule.cfa_offset as u32, Relaxed);
                self.slots.u32_at(slot, BP_OFFSET).store(rule.bp_offset as u32, Relaxed);
                base.store(rule.base.0, Release);
                self.in_use.set(self.in_use.get() + 1);
                return;
            }
        }
    }

    /// Frees the slots of pending rules, so that they are requested again.
    pub(super) fn ask_again(&self) {
        // No rules yet, so they do not count as in use.
        self.drop_all(|base| base == rule_base::RULE_ASKED);
    }

    /// Frees the slots of rules for code that could not be read, so that they are requested again.
    pub(super) fn retry_failed(&self) {
        let freed = self.drop_all(|base| base == rule_base::RULE_FAILED);
        self.in_use.set(self.in_use.get().saturating_sub(freed));
    }

    /// Frees slots. Returns their number. A slot that a program claims is left alone, as the program still writes it.
    fn drop_all(&self, is_dropped: impl Fn(rule_base) -> bool) -> usize {
        let slots = (0..self.slots.entries()).map(|slot| self.slots.u32_at(slot, BASE));
        slots
            .filter(|base| {
                let seen = base.load(Relaxed);
                let is_kept = [rule_base::RULE_NONE, rule_base::RULE_CLAIMED].contains(&rule_base(seen));
                !is_kept
                    && is_dropped(rule_base(seen))
                    && base.compare_exchange(seen, rule_base::RULE_NONE.0, AcqRel, Relaxed).is_ok()
            })
            .count()
    }

    /// Tests whether half of the slots have rules: then few frames find no room yet.
    pub(super) fn is_half_full(&self) -> bool {
        self.in_use.get() >= self.slots.entries() / 2
    }

    /// Removes all rules: they are requested again.
    pub(super) fn clear(&self) {
        self.drop_all(|_| true);
        self.in_use.set(0);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    const SLOTS: usize = 64;
    const PROCESS_ID: u32 = 7;

    fn rules() -> Rules {
        let memory = File::from(memfd_create("rules", MemfdFlags::CLOEXEC).expect("memory for a test"));
        ftruncate(&memory, 4096).expect("memory for a test");
        Rules::new(MappedArray::new(&memory, SLOTS, size_of::<unwind_rule>()).expect("it is mapped"))
    }

    fn bases(rules: &Rules, of: rule_base) -> usize {
        (0..SLOTS).filter(|&slot| rules.slots.u32_at(slot, BASE).load(Relaxed) == of.0).count()
    }

    #[test]
    fn rules_that_are_inserted_again_use_their_slots_once() {
        let rules = rules();
        rules.insert(PROCESS_ID, 1, Rule::plain(rule_base::RULE_ROOT));
        for _ in 0..SLOTS {
            rules.insert(PROCESS_ID, 2, Rule::plain(rule_base::RULE_FAILED));
            assert_eq!((rules.in_use.get(), rules.is_half_full()), (2, false));
            rules.retry_failed();
            assert_eq!((rules.in_use.get(), bases(&rules, rule_base::RULE_NONE)), (1, SLOTS - 1));
        }
        assert_eq!(rules.find(PROCESS_ID, 1), Some(Rule::plain(rule_base::RULE_ROOT)));
        assert_eq!(rules.find(PROCESS_ID, 2), None);
    }

    #[test]
    fn table_is_half_full_once_half_of_its_slots_have_rules() {
        let rules = rules();
        let mut address = 0;
        while bases(&rules, rule_base::RULE_ROOT) < SLOTS / 2 {
            assert!(!rules.is_half_full());
            address += 1;
            rules.insert(PROCESS_ID, address, Rule::plain(rule_base::RULE_ROOT));
        }
        assert!(rules.is_half_full());
        rules.clear();
        assert_eq!((rules.is_half_full(), bases(&rules, rule_base::RULE_NONE)), (false, SLOTS));
    }

    #[test]
    fn clearing_leaves_a_slot_that_a_program_is_writing() {
        let rules = rules();
        rules.insert(PROCESS_ID, 1, Rule::plain(rule_base::RULE_ROOT));
        let base = |slot| rules.slots.u32_at(slot, BASE);
        let mut free = (0..SLOTS).filter(|&slot| base(slot).load(Relaxed) == rule_base::RULE_NONE.0);
        let (claimed, asked) = (free.next().expect("a slot is free"), free.next().expect("a slot is free"));
        base(claimed).store(rule_base::RULE_CLAIMED.0, Relaxed);
        base(asked).store(rule_base::RULE_ASKED.0, Relaxed);
        rules.ask_again();
        assert_eq!(base(asked).load(Relaxed), rule_base::RULE_NONE.0);
        base(asked).store(rule_base::RULE_ASKED.0, Relaxed);
        rules.clear();
        assert_eq!(base(claimed).load(Relaxed), rule_base::RULE_CLAIMED.0);
        assert_eq!(bases(&rules, rule_base::RULE_NONE), SLOTS - 1);
        assert_eq!(rules.find(PROCESS_ID, 1), None);
    }
}
