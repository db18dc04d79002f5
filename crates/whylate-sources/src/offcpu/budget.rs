// SPDX-License-Identifier: MIT OR Apache-2.0
//! Limits the time that reading mappings and files takes: per walk, so that snapshots are on time, and per user, so
//! that one user's processes do not keep those of another from being read.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Time that reading may take in a walk: CPU time, and waits for files on other machines. The first walks read the
/// mappings of all processes, and take longer.
const PER_WALK: Duration = Duration::from_millis(100);
const PER_FIRST_WALK: Duration = Duration::from_secs(1);
/// A walk stops reading after this multiple of its limit in wall time, as when disks are slow or CPUs are busy.
const WALL_TIME_FACTOR: u32 = 5;
const FIRST_WALKS: u64 = 2;
/// Limits of a walk, and of the first ones, for CPU samples of one program.
const PER_WALK_OF_SAMPLES: Duration = Duration::from_millis(50);
const PER_FIRST_WALK_OF_SAMPLES: Duration = Duration::from_millis(250);
/// Token bucket of a user: the burst, and the share of wall time (1/`SHARE`) that refills it.
const BURST: Duration = Duration::from_secs(1);
const SHARE: u32 = 4;
/// A list of mappings is read again only after this multiple of the CPU time of its last reading.
const PAUSE_FACTOR: u32 = 10;
/// Maximum number of users with a bucket.
const MAX_USERS: usize = 1024;

/// Exponential backoff of something that failed: 2 s, then doubled each time up to 64 s.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retry {
    pub(super) due: Instant,
    times: u32,
}

impl Retry {
    const FIRST: Duration = Duration::from_secs(2);
    const MAX_DOUBLINGS: u32 = 5;

    /// Schedules the next retry after a failure; `before` is the retry that has failed.
    pub(super) fn after(before: Option<Retry>, now: Instant) -> Self {
        let times = before.map_or(0, |before| (before.times + 1).min(Self::MAX_DOUBLINGS));
        Retry { due: now + Self::FIRST * (1 << times), times }
    }
}

/// Time that may still be spent on reading.
pub(super) struct Budget {
    left_in_walk: Duration,
    /// Deadline of the walk's readings.
    until: Instant,
    walks: u64,
    /// Limits of the first walks, and of later ones.
    per_first_walk: Duration,
    per_walk: Duration,
    left_by_user: HashMap<u32, (LeftNs, Instant)>,
}

/// Nanoseconds; negative after a reading that took longer than was left.
type LeftNs = i64;

impl Default for Budget {
    fn default() -> Self {
        Budget {
            left_in_walk: Duration::ZERO,
            until: Instant::now(),
            walks: 0,
            per_first_walk: PER_FIRST_WALK,
            per_walk: PER_WALK,
            left_by_user: HashMap::new(),
        }
    }
}

impl Budget {
    /// For CPU samples of one program.
    pub(super) fn of_samples() -> Self {
        Budget { per_first_walk: PER_FIRST_WALK_OF_SAMPLES, per_walk: PER_WALK_OF_SAMPLES, ..Budget::default() }
    }

    pub(super) fn begin_walk(&mut self, now: Instant) {
        self.walks += 1;
        self.left_in_walk = if self.walks <= FIRST_WALKS { self.per_first_walk } else { self.per_walk };
        self.until = now + self.left_in_walk * WALL_TIME_FACTOR;
    }

    /// Returns whether files of a user's processes may be read now.
    pub(super) fn allows(&mut self, user: u32, now: Instant) -> bool {
        if self.left_in_walk.is_zero() || now >= self.until {
            return false;
        }
        if self.left_by_user.len() >= MAX_USERS && !self.left_by_user.contains_key(&user) {
            // The bucket of a user that read nothing during `rest` is full again.
            let rest = BURST * SHARE * 2;
            self.left_by_user.retain(|_, (_, since)| now.saturating_duration_since(*since) < rest);
        }
        let burst = BURST.as_nanos() as LeftNs;
        let (left, since) = self.left_by_user.entry(user).or_insert((burst, now));
        let added = (now.saturating_duration_since(*since) / SHARE).as_nanos() as LeftNs;
        (*left, *since) = (left.saturating_add(added).min(burst), now);
        *left > 0
    }

    /// Charges the time of a reading.
    pub(super) fn charge(&mut self, user: u32, took: Duration) {
        self.left_in_walk = self.left_in_walk.saturating_sub(took);
        if let Some((left, _)) = self.left_by_user.get_mut(&user) {
            *left = left.saturating_sub(took.as_nanos() as LeftNs);
        }
    }

    /// Returns when a list of mappings may be read again.
    pub(super) fn next_reading(now: Instant, took: Duration) -> Instant {
        now + took * PAUSE_FACTOR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_budget_leaves_room_for_other_users() {
        let (mut budget, mut now) = (Budget::default(), Instant::now());
        let (mut hostile, mut honest) = (0, 0);
        for _ in 0..90 {
            now += Duration::from_millis(111);
            budget.begin_walk(now);
            while budget.allows(1, now) {
                budget.charge(1, Duration::from_millis(30));
                hostile += 30;
            }
            if budget.allows(2, now) {
                budget.charge(2, Duration::from_millis(2));
                honest += 1;
            }
        }
        // A quarter of ten seconds, and the burst of one second.
        assert!((3_000..3_800).contains(&hostile), "{hostile} ms");
        assert!(honest >= 75, "read in {honest} of 90 walks");
    }

    #[test]
    fn walk_stops_at_cpu_and_wall_time_limit() {
        let (mut budget, now) = (Budget::default(), Instant::now());
        (0..3).for_each(|_| budget.begin_walk(now));
        let readings = (0..1_000).take_while(|&user| {
            let is_allowed = budget.allows(user, now);
            budget.charge(user, Duration::from_millis(10));
            is_allowed
        });
        assert_eq!(readings.count(), 10);
        budget.begin_walk(now);
        let late = now + PER_WALK * WALL_TIME_FACTOR;
        assert!(budget.allows(1_001, late - Duration::from_millis(1)) && !budget.allows(1_001, late));
    }

    #[test]
    fn backs_off_exponentially_after_failures() {
        let now = Instant::now();
        let mut retry = None;
        let waits: Vec<u64> = (0..7)
            .map(|_| {
                let next = Retry::after(retry, now);
                retry = Some(next);
                (next.due - now).as_secs()
            })
            .collect();
        assert_eq!(waits, [2, 4, 8, 16, 32, 64, 64]);
    }
}
