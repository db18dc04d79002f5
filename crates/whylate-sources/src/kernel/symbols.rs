// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of kernel addresses.

mod data;
mod kallsyms;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use blazesym::MaybeDefault;
use blazesym::symbolize::source::{Kernel as Kallsyms, Source};
use blazesym::symbolize::{Input, Symbolized, Symbolizer};
use rustix::time::{ClockId, clock_gettime};

pub(crate) use self::data::DataSymbols;
use self::kallsyms::{fixed_in, kallsyms};
use crate::kernel::demangle::demangled;
use crate::kernel::loaded_code::{Listed, LoadedCode};

#[cfg(feature = "fuzzing")]
pub(crate) use self::kallsyms::fuzzing;
pub(crate) use self::kallsyms::{ReadOnce, addresses_of, code_of};
pub use self::kallsyms::{address_of, is_kernel_function};

/// Prefixes of functions that are in a stack only because a program of ours takes it.
const OWN_PREFIXES: [&str; 4] = ["bpf_prog_", "bpf_trace_run", "__bpf_trace_", "__traceiter_"];

/// Minimum age of the symbols before they are read again for an unknown address: otherwise reading would take all the
/// time.
const MIN_SYMBOLS_AGE: Duration = Duration::from_millis(200);

/// Maximum age of the list of loaded code when names are looked up.
const MAX_LIST_AGE_NS: u64 = 20_000_000;
/// Time after which BPF programs are enumerated even if none was loaded since.
const ENUMERATION_AGE_NS: u64 = 1_000_000_000;

/// Maximum number of names that each user of the symbols caches.
const MAX_NAMES: usize = 1 << 16;

/// A function in the kernel's symbol list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Function {
    name: String,
    begins: u64,
}

/// Finds the functions at addresses in symbols that were read once.
type Find = dyn Fn(&[u64]) -> Vec<Option<Function>>;

/// Kernel operations that symbolization needs.
trait Kernel {
    /// Returns the range of code that stays; `None` if addresses are hidden.
    fn fixed(&self) -> Option<Range<u64>>;
    /// Reads the current symbols.
    fn symbols(&self) -> Rc<Find>;
    /// Lists the loaded code, with the functions of programs that are not `known`.
    fn loaded(&self, known: &BTreeSet<u32>, thorough: bool) -> Listed;
    fn now_ns(&self) -> u64;
}

struct Running;

impl Kernel for Running {
    fn fixed(&self) -> Option<Range<u64>> {
        fixed_in(&kallsyms().unwrap_or_default())
    }

    fn symbols(&self) -> Rc<Find> {
        // The running kernel's own list has every function; an image on disk would have to be searched for.
        let source = Source::Kernel(Kallsyms { vmlinux: MaybeDefault::None, debug_syms: false, ..Kallsyms::default() });
        let symbolizer = Symbolizer::builder().enable_demangling(false).build();
        Rc::new(move |addresses| {
            let found = symbolizer.symbolize(&source, Input::AbsAddr(addresses)).unwrap_or_default();
            let functions = addresses.iter().zip(&found).map(|(&address, found)| function(address, found));
            functions.collect()
        })
    }

    fn loaded(&self, known: &BTreeSet<u32>, thorough: bool) -> Listed {
        Listed::now(known, thorough)
    }

    fn now_ns(&self) -> u64 {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
    }
}

/// Cached name of an address.
struct CachedName {
    name: String,
    /// The code that has this name.
    of: Code,
}

/// The code at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    /// The kernel's own text, which stays.
    Fixed,
    /// Code of an epoch of [`LoadedCode`].
    Of(u64),
    /// Other code may have run there since the span started: a name is valid for this span only.
    Changed,
}

/// Symbols and code of the kernel, shared by all users.
struct Shared {
    kernel: Box<dyn Kernel>,
    /// Read with the first lookup.
    fixed: Option<Option<Range<u64>>>,
    symbols: Option<Symbols>,
    code: LoadedCode<Rc<Find>>,
    listed_ns: u64,
    /// Time at which all BPF programs were enumerated last.
    enumerated_ns: u64,
    /// Start of each source's last span: code that is named now ran since then.
    began_ns: BTreeMap<&'static str, u64>,
    /// Changes when the name of an address may have changed.
    generation: u64,
}

/// The kernel's symbols as of one read.
struct Symbols {
    find: Rc<Find>,
    /// Epoch of the code when they were read.
    epoch: u64,
    read: Instant,
}

/// Symbolizes kernel addresses, each once while the code there is the same. Reading the kernel's symbols takes some ten
/// milliseconds and megabytes, so the first lookup does it, and sources share the result ([`crate::Session`]). An
/// address in code that was unloaded since the span started has the names of both, as `one or other`: which of them ran
/// is unknown.
pub struct KernelSymbols {
    shared: Rc<RefCell<Shared>>,
    names: HashMap<u64, CachedName>,
}

impl Default for KernelSymbols {
    fn default() -> Self {
        KernelSymbols::new(Box::new(Running))
    }
}

impl KernelSymbols {
    fn new(kernel: Box<dyn Kernel>) -> Self {
        let shared = Shared {
            kernel,
            fixed: None,
            symbols: None,
            code: LoadedCode::default(),
            listed_ns: 0,
            enumerated_ns: 0,
            began_ns: BTreeMap::new(),
            generation: 0,
        };
        KernelSymbols { shared: Rc::new(RefCell::new(shared)), names: HashMap::new() }
    }

    /// Symbols of a kernel that hides addresses.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn without_addresses() -> Self {
        let symbols = KernelSymbols::default();
        symbols.shared.borrow_mut().fixed = Some(None);
        symbols
    }

    /// Returns another user of the same symbols. Code loaded by now is known to it.
    pub fn shared(&self) -> Self {
        self.shared.borrow_mut().list_if_old();
        KernelSymbols { shared: Rc::clone(&self.shared), names: HashMap::new() }
    }

    /// Reads the kernel's symbols now, so that the first name does not wait for them.
    pub(crate) fn load(&self) {
        let mut shared = self.shared.borrow_mut();
        if shared.symbols.is_none() && shared.fixed().is_some() {
            shared.list_if_old();
            shared.read();
            // The symbolizer reads them with its first address.
            if let (Some(symbols), Some(fixed)) = (&shared.symbols, &shared.fixed) {
                (symbols.find)(&[fixed.as_ref().map_or(0, |fixed| fixed.start)]);
            }
        }
    }

    /// Finds the range of code that is never unloaded, while /proc/kallsyms is cached.
    pub(crate) fn find_fixed_code(&self) {
        self.shared.borrow_mut().fixed();
    }

    /// Lists the loaded code, at the end of a span and before the next one starts.
    pub(crate) fn list_code(&self) {
        self.shared.borrow_mut().list_if_old();
    }

    /// Ends a span of the source: the names resolved next are of code that ran since `began_ns` (CLOCK_MONOTONIC).
    pub(crate) fn span_ended(&self, source: &'static str, began_ns: u64) {
        self.shared.borrow_mut().span_ended(source, began_ns);
    }

    /// Returns a number that changes when the name of an address may have changed.
    pub(crate) fn generation(&self) -> u64 {
        self.shared.borrow_mut().list_if_old();
        self.shared.borrow().generation
    }

    /// Returns the function's name, or the address if it is unknown (e.g. under `kernel.kptr_restrict`).
    pub fn name(&mut self, address: u64) -> &str {
        let of = self.shared.borrow_mut().code_at(address);
        if !self.has(address, of) {
            let name = self.shared.borrow_mut().name(address, of);
            self.cache(address, CachedName { name, of });
        }
        self.names.get(&address).map_or("", |named| &named.name)
    }

    /// Tests whether the address has a valid cached name.
    pub(crate) fn is_known(&self, address: u64) -> bool {
        self.has(address, self.shared.borrow_mut().code_at(address))
    }

    fn has(&self, address: u64, of: Code) -> bool {
        of != Code::Changed && self.names.get(&address).is_some_and(|named| named.of == of)
    }

    fn cache(&mut self, address: u64, named: CachedName) {
        if self.names.len() >= MAX_NAMES {
            self.names.clear();
        }
        self.names.insert(address, named);
    }

    /// Looks up all of these addresses together, which takes a third of the time of single lookups.
    pub fn look_up_all(&mut self, addresses: &BTreeSet<u64>) {
        let shared = Rc::clone(&self.shared);
        let mut shared = shared.borrow_mut();
        let codes = addresses.iter().map(|&address| (address, shared.code_at(address)));
        let codes: Vec<(u64, Code)> = codes.collect();
        let unknown: Vec<(u64, Code)> =
            codes.into_iter().filter(|&(address, of)| of != Code::Changed && !self.has(address, of)).collect();
        // Addresses that are not found may be of code that was loaded since: they are looked up again on use.
        for ((address, of), name) in unknown.iter().zip(shared.look_up(&unknown)) {
            if let Some(name) = name {
                self.cache(*address, CachedName { name, of: *of });
            }
        }
    }

    /// Returns the functions of a stack from the kernel's stack maps, innermost first, without our own program and its
    /// callers.
    pub fn stack(&mut self, addresses: &[u8]) -> Vec<String> {
        addresses
            .as_chunks::<8>()
            .0
            .iter()
            .map(|address| u64::from_ne_bytes(*address))
            .take_while(|&address| address != 0)
            .map(|address| self.name(address).to_owned())
            .skip_while(|name| OWN_PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
            .collect()
    }
}

impl Shared {
    /// Returns the range of code that stays, which is read once.
    fn fixed(&mut self) -> Option<&Range<u64>> {
        self.fixed.get_or_insert_with(|| self.kernel.fixed()).as_ref()
    }

    fn list_if_old(&mut self) {
        // If addresses are hidden, none has a name.
        if matches!(self.fixed, Some(None)) {
            return;
        }
        let now_ns = self.kernel.now_ns();
        if self.listed_ns == 0 || now_ns.saturating_sub(self.listed_ns) > MAX_LIST_AGE_NS {
            self.list(now_ns);
        }
    }

    fn list(&mut self, now_ns: u64) {
        self.listed_ns = now_ns;
        let is_thorough = now_ns.saturating_sub(self.enumerated_ns) > ENUMERATION_AGE_NS;
        if is_thorough {
            self.enumerated_ns = now_ns;
        }
        let listed = self.kernel.loaded(self.code.known(), is_thorough);
        let epoch = self.code.epoch();
        let names = self.symbols.as_ref().map(|symbols| (&symbols.find, symbols.epoch));
        self.code.update(listed, now_ns, names);
        self.generation += u64::from(self.code.epoch() != epoch);
    }

    fn span_ended(&mut self, source: &'static str, began_ns: u64) {
        self.list_if_old();
        self.began_ns.insert(source, began_ns);
        let since_ns = self.began_ns.values().min().copied().unwrap_or_default();
        let had_former = self.code.has_former();
        self.code.forget_former(since_ns);
        self.generation += u64::from(had_former);
    }

    fn code_at(&mut self, address: u64) -> Code {
        if self.fixed().is_none_or(|fixed| fixed.contains(&address)) {
            return Code::Fixed;
        }
        self.list_if_old();
        if self.code.has_former() && self.code.former_at(address).next().is_some() {
            return Code::Changed;
        }
        Code::Of(self.code.epoch_of(address))
    }

    fn name(&mut self, address: u64, of: Code) -> String {
        let mut names: Vec<String> = Vec::new();
        if of == Code::Changed {
            for former in self.code.former_at(address) {
                let function = former.names.as_ref().and_then(|find| find(&[address]).pop().flatten());
                let name = function.filter(|function| former.has(function.begins)).map(|function| function.name);
                names.push(name.unwrap_or_else(|| hexadecimal(address)));
            }
        }
        // If nothing is loaded there now, the unloaded code has run.
        if names.is_empty() || self.code.has(address) {
            names.push(self.current_name(address, of).unwrap_or_else(|| hexadecimal(address)));
        }
        let mut seen = BTreeSet::new();
        names.retain(|name| seen.insert(name.clone()));
        names.join(" or ")
    }

    fn current_name(&mut self, address: u64, of: Code) -> Option<String> {
        let of = [(address, if of == Code::Changed { Code::Of(self.code.epoch_of(address)) } else { of })];
        let look_up = |shared: &mut Self| shared.look_up(&of).pop().flatten();
        let name = look_up(self);
        // Unlisted code, such as a trampoline, comes and goes: it may have been loaded since the symbols were read.
        let may_help = self.symbols.as_ref().is_some_and(|symbols| symbols.read.elapsed() >= MIN_SYMBOLS_AGE);
        if name.is_none() && may_help {
            self.read();
            return look_up(self);
        }
        name
    }

    /// Returns the names of the code that is at these addresses now, if any.
    fn look_up(&mut self, wanted: &[(u64, Code)]) -> Vec<Option<String>> {
        if self.fixed().is_none() || wanted.is_empty() {
            return vec![None; wanted.len()];
        }
        let newest = wanted.iter().map(|(_, of)| if let Code::Of(epoch) = of { *epoch } else { 0 }).max();
        if self.symbols.as_ref().is_none_or(|symbols| newest > Some(symbols.epoch)) {
            self.read();
        }
        let Some(symbols) = &self.symbols else { return vec![None; wanted.len()] };
        let addresses: Vec<u64> = wanted.iter().map(|&(address, _)| address).collect();
        let code = &self.code;
        let names = (symbols.find)(&addresses).into_iter().zip(&addresses).map(|(function, &address)| {
            let Function { name, begins } = function?;
            code.belongs(address, &name, begins).then_some(name)
        });
        names.collect()
    }

    /// Reads the symbols, which are those of all listed code.
    fn read(&mut self) {
        let (find, epoch) = (self.kernel.symbols(), self.code.epoch());
        let before = self.symbols.replace(Symbols { find, epoch, read: Instant::now() });
        // Each takes megabytes.
        self.code.keep_names(|names| before.as_ref().is_some_and(|before| Rc::ptr_eq(names, &before.find)));
    }
}

fn hexadecimal(address: u64) -> String {
    format!("{address:#x}")
}

/// Converts a symbol of the symbolizer.
fn function(address: u64, found: &Symbolized<'_>) -> Option<Function> {
    let symbol = found.as_sym()?;
    Some(Function { name: demangled(&symbol.name).into_owned(), begins: address.saturating_sub(symbol.offset as u64) })
}

#[cfg(test)]
mod tests;
