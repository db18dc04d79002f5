// SPDX-License-Identifier: MIT OR Apache-2.0
//! Addresses of kernel functions, from /proc/kallsyms.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Parses /proc/kallsyms, in its order. Addresses are 0 if the kernel hides them.
fn symbols_of(kallsyms: &str) -> impl Iterator<Item = (u64, &str)> {
    kallsyms.lines().filter_map(|line| {
        // `ADDRESS TYPE NAME`, and a tab before the name of a module.
        let (address, rest) = line.split_once(' ')?;
        let (_, name) = rest.split_once(' ')?;
        let name = name.split_once('\t').map_or(name, |(name, _)| name);
        Some((u64::from_str_radix(address, 16).ok()?, name))
    })
}

/// Returns the data in /proc/kallsyms, as far as it is shown.
pub(super) fn data_of(kallsyms: &str) -> Vec<(u64, Box<str>)> {
    let is_data = |line: &&str| {
        let kind = line.split(' ').nth(1).unwrap_or_default();
        matches!(kind, "b" | "B" | "d" | "D")
    };
    let data = kallsyms.lines().filter(is_data).flat_map(symbols_of);
    data.filter(|&(address, _)| address != 0).map(|(address, name)| (address, name.into())).collect()
}

/// Number of live [`ReadOnce`] guards, and the text of /proc/kallsyms while there are any.
static READ_ONCE: Mutex<(usize, Option<Arc<String>>)> = Mutex::new((0, None));

/// Guard that caches /proc/kallsyms while it lives. Each read takes some 60 ms, as a distribution's kernel has 200,000
/// symbols. The text takes some ten megabytes.
pub(crate) struct ReadOnce(());

impl ReadOnce {
    pub fn begin() -> Self {
        READ_ONCE.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
        ReadOnce(())
    }
}

impl Drop for ReadOnce {
    fn drop(&mut self) {
        let mut cached = READ_ONCE.lock().unwrap_or_else(PoisonError::into_inner);
        cached.0 -= 1;
        if cached.0 == 0 {
            cached.1 = None;
        }
    }
}

/// Returns the text of /proc/kallsyms.
pub(super) fn kallsyms() -> std::io::Result<Arc<String>> {
    let mut cached = READ_ONCE.lock().unwrap_or_else(PoisonError::into_inner);
    if let (1.., Some(text)) = &*cached {
        return Ok(Arc::clone(text));
    }
    let text = Arc::new(std::fs::read_to_string("/proc/kallsyms")?);
    if cached.0 > 0 {
        cached.1 = Some(Arc::clone(&text));
    }
    Ok(text)
}

/// Returns the address of a kernel function.
///
/// # Errors
/// Fails if the kernel does not show it, as without CAP_SYSLOG; contains the remedy.
pub fn address_of(function: &str) -> std::io::Result<u64> {
    let kallsyms = kallsyms()?;
    let found = symbols_of(&kallsyms).find(|&(_, name)| name == function);
    match found {
        Some((address, _)) if address != 0 => Ok(address),
        _ => Err(std::io::Error::other(format!(
            "/proc/kallsyms does not show where {function} is ({})",
            to_see_addresses()
        ))),
    }
}

/// Returns the addresses of kernel functions; 0 if a function does not exist, or is hidden.
pub(crate) fn addresses_of<const COUNT: usize>(functions: [&str; COUNT]) -> [u64; COUNT] {
    let mut addresses = [0; COUNT];
    for (address, name) in symbols_of(&kallsyms().unwrap_or_default()) {
        if let Some(index) = functions.iter().position(|wanted| *wanted == name) {
            addresses[index] = address;
        }
    }
    addresses
}

/// Returns how to make the kernel show addresses.
fn to_see_addresses() -> &'static str {
    let restricted = std::fs::read_to_string("/proc/sys/kernel/kptr_restrict").unwrap_or_default();
    match restricted.trim() {
        "2" => "set kernel.kptr_restrict to 1, and run as root or grant CAP_SYSLOG",
        _ => "run as root, or grant CAP_SYSLOG",
    }
}

/// Returns the address ranges of kernel functions, as far as the kernel shows them.
pub(crate) fn code_of<const COUNT: usize>(functions: [&str; COUNT]) -> [Option<Range<u64>>; COUNT] {
    code_in(&kallsyms().unwrap_or_default(), functions)
}

fn code_in<const COUNT: usize>(kallsyms: &str, functions: [&str; COUNT]) -> [Option<Range<u64>>; COUNT] {
    let (mut begins, mut all) = ([None; COUNT], Vec::new());
    for (address, name) in symbols_of(kallsyms) {
        all.push(address);
        if let Some(index) = functions.iter().position(|wanted| *wanted == name) {
            begins[index] = Some(address);
        }
    }
    all.sort_unstable();
    begins.map(|begin| {
        let begin = begin.filter(|&begin| begin != 0)?;
        let end = all.get(all.partition_point(|&address| address <= begin))?;
        Some(begin..*end)
    })
}

/// Returns the kernel's own text, without modules; `None` if addresses are hidden, and empty if its end is unknown.
pub(super) fn fixed_in(kallsyms: &str) -> Option<Range<u64>> {
    let (mut begin, mut end, mut is_shown) = (0, 0, false);
    for (address, name) in symbols_of(kallsyms) {
        is_shown |= address != 0;
        match name {
            "_stext" => begin = address,
            "_etext" => end = address,
            _ => {}
        }
    }
    is_shown.then_some(if begin != 0 && begin < end { begin..end } else { 0..0 })
}

/// Tests whether the kernel or a module has a function of this name; `None` if /proc/kallsyms cannot be read.
pub fn is_kernel_function(name: &str) -> Option<bool> {
    let kallsyms = kallsyms().ok()?;
    Some(symbols_of(&kallsyms).any(|(_, known)| known == name))
}

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    /// Finds code in the text of /proc/kallsyms.
    ///
    /// # Panics
    /// Panics if code ends before it starts.
    pub fn kallsyms(text: &str) {
        let [one, other] = super::code_in(text, ["schedule", "a"]);
        assert!([one, other].into_iter().flatten().all(|code| code.start < code.end));
    }
}
