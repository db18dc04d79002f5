// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decoders for `make fuzz`.

use std::cell::RefCell;

use super::Windows;
use crate::kernel::symbols::KernelSymbols;

/// Runs `read` with decoders; kernel functions are named by their addresses.
pub(crate) fn with_names<T>(read: impl FnOnce(&mut Windows, &mut KernelSymbols) -> Option<T>) {
    thread_local! {
        // Reading the cgroup hierarchy for each input would dominate.
        static NAMES: (RefCell<Windows>, KernelSymbols) = (RefCell::default(), KernelSymbols::without_addresses());
    }
    NAMES.with(|(windows, symbols)| drop(read(&mut windows.borrow_mut(), &mut symbols.shared())));
}
