// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of kernel addresses.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blazesym::MaybeDefault;
use blazesym::symbolize::source::{Kernel, Source};
use blazesym::symbolize::{Input, Symbolized, Symbolizer};

use crate::demangle::demangled;
use crate::loaded_code::LoadedCode;

/// The kernel's symbols in the order of /proc/kallsyms. Their addresses are 0 where the kernel does not tell them.
fn symbols_of(kallsyms: &str) -> impl Iterator<Item = (u64, &str)> {
    kallsyms.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        Some((u64::from_str_radix(words.next()?, 16).ok()?, words.nth(1)?))
    })
}

/// The kernel's symbols while some [`ReadOnce`] is there, and how many are.
static READ_ONCE: Mutex<(usize, Option<Arc<String>>)> = Mutex::new((0, None));

/// While it is there /proc/kallsyms is read once, which takes some 60 ms each time: a distribution's kernel has 200,000
/// symbols. They take some ten megabytes.
pub(crate) struct ReadOnce(());

impl ReadOnce {
    pub fn begin() -> Self {
        READ_ONCE.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
        ReadOnce(())
    }
}

impl Drop for ReadOnce {
    fn drop(&mut self) {
        let mut kept = READ_ONCE.lock().unwrap_or_else(PoisonError::into_inner);
        kept.0 -= 1;
        if kept.0 == 0 {
            kept.1 = None;
        }
    }
}

/// The text of /proc/kallsyms.
fn kallsyms() -> std::io::Result<Arc<String>> {
    let mut kept = READ_ONCE.lock().unwrap_or_else(PoisonError::into_inner);
    if let (1.., Some(text)) = &*kept {
        return Ok(Arc::clone(text));
    }
    let text = Arc::new(std::fs::read_to_string("/proc/kallsyms")?);
    if kept.0 > 0 {
        kept.1 = Some(Arc::clone(&text));
    }
    Ok(text)
}

/// Where a kernel function is.
///
/// # Errors
/// When the kernel does not tell, as it does not without CAP_SYSLOG, and what to do then.
pub fn address_of(function: &str) -> std::io::Result<u64> {
    let kallsyms = kallsyms()?;
    let found = symbols_of(&kallsyms).find(|&(_, name)| name == function);
    match found {
        Some((address, _)) if address != 0 => Ok(address),
        _ => Err(std::io::Error::other(format!(
            "/proc/kallsyms does not tell where {function} is ({})",
            to_see_addresses()
        ))),
    }
}

/// What makes the kernel tell where its functions are.
pub(crate) fn to_see_addresses() -> &'static str {
    let restricted = std::fs::read_to_string("/proc/sys/kernel/kptr_restrict").unwrap_or_default();
    match restricted.trim() {
        "2" => "set kernel.kptr_restrict to 1, and run as root or grant CAP_SYSLOG",
        _ => "run as root, or grant CAP_SYSLOG",
    }
}

/// Whether the kernel tells where its functions are.
fn are_addresses_told() -> bool {
    kallsyms().is_ok_and(|kallsyms| symbols_of(&kallsyms).any(|(address, _)| address != 0))
}

/// From where to where the code of kernel functions goes, as far as the kernel tells.
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

/// The code from a function of the kernel to the end of the last one that begins so, where addresses are told.
pub(crate) fn code_between(first: &str, last_begins: &str) -> Option<Range<u64>> {
    between_in(&kallsyms().unwrap_or_default(), first, last_begins)
}

fn between_in(kallsyms: &str, first: &str, last_begins: &str) -> Option<Range<u64>> {
    let (begin, _) = symbols_of(kallsyms).find(|&(at, name)| name == first && at != 0)?;
    let last = symbols_of(kallsyms).filter(|(_, name)| name.starts_with(last_begins)).map(|(at, _)| at).max()?;
    let end = symbols_of(kallsyms).map(|(at, _)| at).filter(|&at| at > last).min()?;
    (begin < end).then_some(begin..end)
}

/// How functions begin that stand in a stack only because a program of ours takes it.
const OWN: [&str; 4] = ["bpf_prog_", "bpf_trace_run", "__bpf_trace_", "__traceiter_"];

/// Reading the symbols again for each address that is nobody's would take all the time.
const READ_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// The kernel's symbols as they were read, and the code that there was.
struct Symbols {
    symbolizer: Symbolizer,
    code: LoadedCode,
    read: Instant,
    /// Without the privilege no address has a name, however often the symbols are read.
    are_told: bool,
}

/// Looks kernel addresses up, each once. Reading the kernel's symbols takes some ten milliseconds and megabytes, so it
/// happens with the first look-up only, and sources share what was read ([`crate::Session`]).
#[derive(Default)]
pub struct KernelSymbols {
    read: Rc<RefCell<Option<Symbols>>>,
    names: HashMap<u64, String>,
}

impl KernelSymbols {
    /// Of a kernel that does not tell where its functions are.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn untold() -> Self {
        let symbols = Symbols { are_told: false, ..Symbols::now() };
        KernelSymbols { read: Rc::new(RefCell::new(Some(symbols))), names: HashMap::new() }
    }

    /// Others, by the same reading.
    pub fn shared(&self) -> Self {
        KernelSymbols { read: Rc::clone(&self.read), names: HashMap::new() }
    }

    /// The function's name, or the address where nothing is known (e.g. under `kernel.kptr_restrict`).
    pub fn name(&mut self, address: u64) -> &str {
        if !self.names.contains_key(&address) {
            let name = self.look_up(address);
            self.names.insert(address, name);
        }
        &self.names[&address]
    }

    /// Looks up all of these addresses together, which takes a third of the time that it takes one by one.
    pub fn look_up_all(&mut self, addresses: &BTreeSet<u64>) {
        let unknown: Vec<u64> = addresses.iter().copied().filter(|address| !self.names.contains_key(address)).collect();
        if unknown.is_empty() {
            return;
        }
        let mut read = self.read.borrow_mut();
        let Symbols { symbolizer, code, are_told: true, .. } = read.get_or_insert_with(Symbols::now) else { return };
        let Ok(found) = symbolizer.symbolize(&Self::source(), Input::AbsAddr(&unknown)) else { return };
        // Those that are not found may be of code that was loaded since: they are looked up again when they are asked
        // for.
        let named =
            unknown.into_iter().zip(found).filter_map(|(address, found)| Some((address, name(address, &found, code)?)));
        self.names.extend(named);
    }

    /// The running kernel's own list has every function; an image on disk would have to be searched for.
    fn source() -> Source<'static> {
        Source::Kernel(Kernel { vmlinux: MaybeDefault::None, debug_syms: false, ..Kernel::default() })
    }

    /// The functions of a stack as the kernel's stack maps hold it, innermost first, without our own program and what
    /// calls it.
    pub fn stack(&mut self, addresses: &[u8]) -> Vec<String> {
        addresses
            .as_chunks::<8>()
            .0
            .iter()
            .map(|address| u64::from_ne_bytes(*address))
            .take_while(|&address| address != 0)
            .map(|address| self.name(address).to_owned())
            .skip_while(|name| OWN.iter().any(|prefix| name.starts_with(prefix)))
            .collect()
    }

    fn look_up(&mut self, address: u64) -> String {
        let mut name = self.look_up_known(address);
        // BPF programs and modules come and go: one that was loaded since the symbols were read is not among them.
        let may_help =
            self.read.borrow().as_ref().is_some_and(|known| known.are_told && known.read.elapsed() >= READ_AGAIN_AFTER);
        if name.is_none() && may_help {
            *self.read.borrow_mut() = None;
            name = self.look_up_known(address);
        }
        name.unwrap_or_else(|| format!("{address:#x}"))
    }

    fn look_up_known(&mut self, address: u64) -> Option<String> {
        let mut read = self.read.borrow_mut();
        let Symbols { symbolizer, code, are_told: true, .. } = read.get_or_insert_with(Symbols::now) else {
            return None;
        };
        let found = symbolizer.symbolize_single(&Self::source(), Input::AbsAddr(address)).ok()?;
        name(address, &found, code)
    }
}

impl Symbols {
    /// To be read with the first look-up, and the code that there is.
    fn now() -> Self {
        let symbolizer = Symbolizer::builder().enable_demangling(false).build();
        let code = LoadedCode::now();
        Symbols { symbolizer, code, read: Instant::now(), are_told: are_addresses_told() }
    }
}

/// The name that was found, unless the function is over before the address.
fn name(address: u64, found: &Symbolized<'_>, code: &mut LoadedCode) -> Option<String> {
    let symbol = found.as_sym()?;
    let begins = address.saturating_sub(symbol.offset as u64);
    code.belongs(address, &symbol.name, begins).then(|| demangled(&symbol.name).into_owned())
}

/// Whether the kernel or one of its modules has a function of this name; `None` where the kernel does not tell.
pub fn is_kernel_function(name: &str) -> Option<bool> {
    let kallsyms = kallsyms().ok()?;
    Some(symbols_of(&kallsyms).any(|(_, known)| known == name))
}

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    /// What /proc/kallsyms tells of where code is.
    ///
    /// # Panics
    /// When code ends before it begins.
    pub fn kallsyms(text: &str) {
        let [one, other] = super::code_in(text, ["schedule", "a"]);
        let between = super::between_in(text, "a", "b");
        assert!([one, other, between].into_iter().flatten().all(|code| code.start < code.end));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_kept_as_long_as_somebody_asks_for_that() {
        let read_once = [ReadOnce::begin(), ReadOnce::begin()];
        let Ok(first) = kallsyms() else { return };
        assert!(Arc::ptr_eq(&first, &kallsyms().expect("it is there")));
        drop(read_once);
        assert!(!Arc::ptr_eq(&first, &kallsyms().expect("it is there")));
    }

    #[test]
    fn symbols_are_read_again_only_where_addresses_are_told() {
        let long_ago = Instant::now() - 2 * READ_AGAIN_AFTER;
        for are_told in [true, false] {
            let mut symbols = KernelSymbols::default();
            *symbols.read.borrow_mut() = Some(Symbols { read: long_ago, are_told, ..Symbols::now() });
            // Nobody's, as each address is where they are hidden.
            assert_eq!(symbols.name(0x10), "0x10");
            let read = symbols.read.borrow().as_ref().map(|known| known.read);
            assert_eq!(read != Some(long_ago), are_told);
        }
    }
}
