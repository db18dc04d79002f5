// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cursors are visited by what can change them: as often as that happens, and nothing is missed.

use super::super::{Finding, Limits};
use super::every_cursor::walk_every;
use super::*;

/// Limits a thread now and then.
struct SomeLimits;

impl Limits for SomeLimits {
    fn of(&self, tid: u32, running_ns: u64) -> Option<(u64, u32)> {
        (running_ns % 5 == 0).then(|| (running_ns.saturating_sub(u64::from(tid) * 7), tid))
    }
}

fn any_asked() -> impl Strategy<Value = Asked> {
    (1_u32..6, 0_u64..450, 0_u64..450, any::<bool>(), any::<bool>())
        .prop_map(|(tid, from_ns, to_ns, is_wait, is_command)| Asked { tid, from_ns, to_ns, is_wait, is_command })
}

/// In the order in which they were found; of each walk, as walks do not depend on each other.
fn of_each(asked: &[Asked], walk: impl FnOnce(&mut dyn FnMut(usize, Finding))) -> Vec<Vec<Finding>> {
    let mut found = vec![Vec::new(); asked.len()];
    walk(&mut |index, finding| found[index].push(finding));
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn walks_find_the_same_as_if_each_change_were_shown_to_each(
        cpus in prop::collection::vec(prop::collection::vec(any_slice(), 0..40), 1..4),
        asked in prop::collection::vec(any_asked(), 0..12),
        is_sorted in any::<bool>(),
        is_limited in any::<bool>(),
    ) {
        let mut past = Recorded { cpus };
        if is_sorted {
            past.cpus.iter_mut().for_each(|cpu| cpu.sort_by_key(|slice| (slice.start_ns, slice.end_ns)));
        }
        let limits: &dyn Limits = if is_limited { &SomeLimits } else { &() };
        let now = of_each(&asked, |found| walk(&mut past.clone(), &asked, limits, found));
        let before = of_each(&asked, |found| walk_every(&mut past.clone(), &asked, limits, found));
        for (now, before) in now.into_iter().zip(before) {
            // Where a wait began was found just before the last part of it.
            let is_asleep = |finding: &Finding| matches!(finding, Finding::Asleep { .. });
            let apart = |all: &[Finding]| all.iter().copied().partition::<Vec<Finding>, _>(is_asleep);
            prop_assert_eq!(apart(&now), apart(&before));
            let path = |all: Vec<Finding>| {
                let mut found = Found::default();
                all.into_iter().for_each(|finding| found.add(finding));
                found.finish(&mut Plain)
            };
            prop_assert_eq!(path(now), path(before));
        }
    }
}
