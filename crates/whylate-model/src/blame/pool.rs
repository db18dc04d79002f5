// SPDX-License-Identifier: MIT OR Apache-2.0
//! Worker pools of the kernel's workqueues, and the items that hold their slots.

use serde::{Deserialize, Serialize};

use crate::Occupant;
use crate::occupancy::BusyPools;

/// Kind of a worker pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PoolClass {
    /// A CPU's own pool of normal priority.
    #[default]
    Normal,
    /// A CPU's own pool for workqueues with `WQ_HIGHPRI`.
    Highpri,
    /// A pool that is not bound to one CPU.
    Unbound,
    /// Runs in a softirq (`WQ_BH`).
    Softirq,
}

/// An item that another one waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HeldSlot {
    /// Name of the item's function.
    pub handler: String,
    /// Time at which a worker started the item.
    pub started_ns: u64,
    /// Time at which the item ended.
    pub ended_ns: u64,
}

impl PoolClass {
    /// Returns whether the occupant is a work item on a worker of this CPU's own pool, by the worker's name.
    pub(super) fn is_of(self, occupant: &Occupant, cpu: u32) -> bool {
        let Occupant::Work { name, .. } = occupant else {
            return false;
        };
        // kworker/CPU:ID, with a trailing H in the high-priority pool.
        let number = name.strip_prefix("kworker/").and_then(|rest| rest.strip_prefix(&format!("{cpu}:")));
        match self {
            PoolClass::Normal => number.is_some_and(|number| !number.ends_with('H')),
            PoolClass::Highpri => number.is_some_and(|number| number.ends_with('H')),
            PoolClass::Unbound | PoolClass::Softirq => false,
        }
    }
}

impl BusyPools {
    /// Returns whether the CPU's own pool of this class has an item in progress; false for pools without a CPU.
    pub fn has(self, pool: PoolClass) -> bool {
        match pool {
            PoolClass::Normal => self.normal,
            PoolClass::Highpri => self.highpri,
            PoolClass::Unbound | PoolClass::Softirq => false,
        }
    }
}
