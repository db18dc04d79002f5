// SPDX-License-Identifier: MIT OR Apache-2.0
//! Labels: what figures, stacks and events are of.

use std::collections::BTreeMap;

/// Names and values that identify a series, e.g. `handler` = `vmstat_update`.
pub type Labels = BTreeMap<String, String>;
