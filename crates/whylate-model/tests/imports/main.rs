// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of other tools: damaged, pasted into reports, and followed backward and forward. One program, as each takes
//! seconds to link.

mod ftrace;
mod pasted;
mod recorded;
