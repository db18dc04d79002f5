// SPDX-License-Identifier: MIT OR Apache-2.0
//! Independent records of what happened, and bounds that decide comparisons with them.

pub mod blk_tracer;
pub mod bpf_programs;
pub mod chance;
pub mod disk_counts;
pub mod function_graph;
pub mod trace;
pub mod work_item_pairs;
