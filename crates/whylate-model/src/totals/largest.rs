// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters with labels from the outside, of which a fixed number is shown.

use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Counters known but not shown, as a multiple of those shown. Beyond them, a label is not remembered.
const REMEMBERED: usize = 10;
/// A counter takes another one's place if it has grown this many times as much recently.
const CLEARLY: f64 = 2.0;
/// Growth loses half of its weight in this time.
const HALF_LIFE_NS: f64 = 600e9;

/// Sums of nanoseconds by label. At most `limit` labels are shown, those that grew most recently; what is added to
/// others counts for all others together.
///
/// No shown sum ever falls, except that of a label that was forgotten and has come back: a label that loses its place
/// keeps its sum, as long as it is remembered. Nothing is counted twice.
#[derive(Clone, Debug)]
pub struct Largest<K> {
    limit: usize,
    sums: BTreeMap<K, Sum>,
    shown: usize,
    others_ns: u64,
    /// Number of additions to the sum of the others.
    beyond: u64,
}

#[derive(Clone, Copy, Debug)]
struct Sum {
    /// Sum while the label is shown.
    ns: u64,
    /// Weighted growth of late.
    growth: f64,
    is_shown: bool,
    /// When the sum started from zero, in nanoseconds since 1970.
    since_unix_ns: u64,
}

impl<K: Clone + Ord> Largest<K> {
    /// Creates an empty set of counters that shows `limit` labels.
    pub fn new(limit: usize) -> Self {
        Largest { limit, sums: BTreeMap::new(), shown: 0, others_ns: 0, beyond: 0 }
    }

    /// Adds to the sum of a label.
    pub fn add(&mut self, key: K, ns: u64, now_unix_ns: u64) {
        let remembered = self.sums.len();
        let sum = match self.sums.get_mut(&key) {
            Some(sum) => sum,
            None if remembered >= self.limit.saturating_mul(REMEMBERED) => return self.add_to_others(ns),
            None => {
                let is_shown = self.shown < self.limit;
                self.shown += usize::from(is_shown);
                self.sums.entry(key).or_insert(Sum { ns: 0, growth: 0.0, is_shown, since_unix_ns: now_unix_ns })
            }
        };
        sum.growth += ns as f64;
        if sum.is_shown {
            sum.ns = sum.ns.saturating_add(ns);
        } else {
            self.add_to_others(ns);
        }
    }

    fn add_to_others(&mut self, ns: u64) {
        self.others_ns = self.others_ns.saturating_add(ns);
        self.beyond += 1;
    }

    /// Lets time pass: gives places to labels that grew clearly more recently than those that have them, and forgets
    /// labels that no longer grow while others need to be remembered.
    pub fn pass(&mut self, ns: u64) {
        let weight = 0.5_f64.powf(ns as f64 / HALF_LIFE_NS);
        self.sums.values_mut().for_each(|sum| sum.growth *= weight);
        let by_growth = |a: &(&K, f64), b: &(&K, f64)| a.1.total_cmp(&b.1);
        for _ in 0..self.limit {
            let of = |is_shown: bool| {
                let sums = self.sums.iter().filter(move |(_, sum)| sum.is_shown == is_shown);
                sums.map(|(key, sum)| (key, sum.growth))
            };
            let (Some((least, low)), Some((most, high))) = (of(true).min_by(by_growth), of(false).max_by(by_growth))
            else {
                break;
            };
            if (low * CLEARLY).partial_cmp(&high) != Some(Ordering::Less) {
                break;
            }
            for (key, is_shown) in [(least.clone(), false), (most.clone(), true)] {
                self.sums.entry(key).and_modify(|sum| sum.is_shown = is_shown);
            }
        }
        // A tenth of the room is for labels to come.
        let most = self.limit.saturating_mul(REMEMBERED) * 9 / 10;
        if self.sums.len() > most {
            let hidden = self.sums.iter().filter(|(_, sum)| !sum.is_shown).map(|(key, sum)| (key, sum.growth));
            let mut hidden: Vec<(&K, f64)> = hidden.collect();
            hidden.sort_by(by_growth);
            let forgotten: Vec<K> = hidden.iter().take(self.sums.len() - most).map(|(key, _)| (*key).clone()).collect();
            for key in forgotten {
                self.sums.remove(&key);
            }
        }
    }

    /// Iterates over the shown labels, each with its sum in nanoseconds and when that started from zero.
    pub fn shown(&self) -> impl Iterator<Item = (&K, u64, u64)> {
        self.sums.iter().filter(|(_, sum)| sum.is_shown).map(|(key, sum)| (key, sum.ns, sum.since_unix_ns))
    }

    /// Returns what was added to labels while they were not shown, in nanoseconds.
    pub fn others_ns(&self) -> u64 {
        self.others_ns
    }

    /// Returns how many additions were to labels that were not shown.
    pub fn beyond(&self) -> u64 {
        self.beyond
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn shown(counters: &Largest<u32>) -> Vec<(u32, u64)> {
        counters.shown().map(|(key, ns, _)| (*key, ns)).collect()
    }

    #[test]
    fn label_that_grows_clearly_more_takes_a_place() {
        let mut counters = Largest::new(2);
        for (key, ns) in [(1, 100), (2, 10), (3, 15)] {
            counters.add(key, ns, 7);
        }
        counters.pass(SECOND_NS);
        assert_eq!(shown(&counters), [(1, 100), (2, 10)]);
        counters.add(3, 10, 8);
        counters.pass(SECOND_NS);
        counters.add(3, 5, 9);
        assert_eq!(shown(&counters), [(1, 100), (3, 5)]);
        assert_eq!((counters.others_ns(), counters.beyond()), (25, 2));
        // It comes back with its sum.
        counters.add(2, 1_000, 10);
        counters.pass(SECOND_NS);
        assert_eq!(shown(&counters), [(1, 100), (2, 10)]);
    }

    #[test]
    fn old_growth_counts_less() {
        let mut counters = Largest::new(1);
        counters.add(1, 1_000, 0);
        counters.pass(3_600 * SECOND_NS);
        counters.add(2, 50, 0);
        counters.pass(0);
        counters.add(2, 1, 0);
        assert_eq!(shown(&counters), [(2, 1)]);
    }

    proptest! {
        #[test]
        fn sums_add_up_and_never_fall(
            additions in proptest::collection::vec((0_u32..60, 0_u64..1_000, any::<bool>()), 0..2_000),
            limit in 1_usize..5,
        ) {
            let mut counters = Largest::new(limit);
            let (mut all, mut before) = (0, BTreeMap::new());
            let mut is_remembered = true;
            for (key, ns, passes) in additions {
                counters.add(key, ns, 0);
                all += ns;
                if passes {
                    let known = counters.sums.len();
                    counters.pass(SECOND_NS);
                    is_remembered &= counters.sums.len() == known;
                }
                prop_assert!(counters.sums.len() <= limit * REMEMBERED);
                prop_assert!(counters.shown().count() <= limit);
                if is_remembered {
                    for (key, ns) in shown(&counters) {
                        let was = before.insert(key, ns).unwrap_or(0);
                        prop_assert!(was <= ns, "{key} fell from {was} to {ns}");
                    }
                }
            }
            let named: u64 = counters.sums.values().map(|sum| sum.ns).sum();
            prop_assert!(named + counters.others_ns() <= all);
            prop_assert!(!is_remembered || named + counters.others_ns() == all);
        }
    }
}
