// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of kernel addresses.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blazesym::MaybeDefault;
use blazesym::symbolize::source::{Kernel as Kallsyms, Source};
use blazesym::symbolize::{Input, Symbolized, Symbolizer};
use rustix::time::{ClockId, clock_gettime};

use crate::kernel::demangle::demangled;
use crate::kernel::loaded_code::{Listed, LoadedCode};

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
fn kallsyms() -> std::io::Result<Arc<String>> {
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
pub(crate) fn to_see_addresses() -> &'static str {
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

/// Prefixes of functions that are in a stack only because a program of ours takes it.
const OWN_PREFIXES: [&str; 4] = ["bpf_prog_", "bpf_trace_run", "__bpf_trace_", "__traceiter_"];

/// Minimum age of the symbols before they are read again for an unknown address: otherwise reading would take all the
/// time.
const MIN_SYMBOLS_AGE: Duration = Duration::from_millis(200);

/// Maximum age of the list of loaded code when names are looked up.
const MAX_LIST_AGE_NS: u64 = 20_000_000;

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
    fn loaded(&self, known: &BTreeSet<u32>) -> Listed;
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

    fn loaded(&self, known: &BTreeSet<u32>) -> Listed {
        Listed::now(known)
    }

    fn now_ns(&self) -> u64 {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
    }
}

/// Returns the kernel's own text, without modules; `None` if addresses are hidden, and empty if its end is unknown.
fn fixed_in(kallsyms: &str) -> Option<Range<u64>> {
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
        let listed = self.kernel.loaded(self.code.known());
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::fd::{FromRawFd as _, OwnedFd};

    use libbpf_rs::libbpf_sys;

    use super::*;

    #[test]
    fn kallsyms_are_cached_while_guard_lives() {
        let read_once = [ReadOnce::begin(), ReadOnce::begin()];
        let Ok(first) = kallsyms() else { return };
        assert!(Arc::ptr_eq(&first, &kallsyms().expect("it is there")));
        drop(read_once);
        assert!(!Arc::ptr_eq(&first, &kallsyms().expect("it is there")));
    }

    /// ID, address, and name of a program.
    type Program = (u32, u64, &'static str);

    /// A kernel with the code and symbols that a test sets.
    #[derive(Clone, Default)]
    struct FakeKernel {
        /// BPF programs of 256 bytes: ID, address, name.
        programs: Rc<RefCell<Vec<Program>>>,
        now_ns: Rc<Cell<u64>>,
        read: Rc<Cell<u32>>,
        is_hidden: bool,
    }

    const FIXED: u64 = 0x100_0000;
    const ADDRESS: u64 = 0x900_0000;

    impl Kernel for FakeKernel {
        fn fixed(&self) -> Option<Range<u64>> {
            (!self.is_hidden).then_some(FIXED..FIXED + 0x1000)
        }

        fn symbols(&self) -> Rc<Find> {
            self.read.set(self.read.get() + 1);
            let programs = self.programs.borrow().clone();
            let find = move |address: u64| {
                let of_program = programs.iter().rfind(|(_, begins, _)| (*begins..begins + 256).contains(&address));
                let function = |begins, name: &str| Function { name: name.to_owned(), begins };
                let fixed = (FIXED..FIXED + 0x1000).contains(&address).then(|| function(FIXED, "schedule"));
                of_program.map(|(_, begins, name)| function(*begins, name)).or(fixed)
            };
            Rc::new(move |addresses| addresses.iter().map(|&address| find(address)).collect())
        }

        fn loaded(&self, known: &BTreeSet<u32>) -> Listed {
            let programs = self.programs.borrow();
            let new = programs.iter().filter(|(id, ..)| !known.contains(id));
            Listed {
                programs: programs.iter().map(|(id, ..)| *id).collect(),
                functions: new.map(|&(id, begins, _)| (id, std::iter::once(begins..begins + 256).collect())).collect(),
                ..Listed::default()
            }
        }

        fn now_ns(&self) -> u64 {
            self.now_ns.get()
        }
    }

    impl FakeKernel {
        fn load(&self, programs: &[(u32, u64, &'static str)]) {
            *self.programs.borrow_mut() = programs.to_vec();
        }

        /// Advances the clock by a second, and ends a span of that second.
        fn next_span(&self, symbols: &KernelSymbols) {
            let began_ns = self.now_ns.get();
            self.now_ns.set(began_ns + 1_000_000_000);
            symbols.list_code();
            symbols.span_ended("source", began_ns);
        }
    }

    fn fake() -> (FakeKernel, KernelSymbols) {
        let kernel = FakeKernel::default();
        kernel.now_ns.set(1_000_000_000);
        (kernel.clone(), KernelSymbols::new(Box::new(kernel)))
    }

    const ONE: &str = "bpf_prog_0123456789abcdef_one";
    const OTHER: &str = "bpf_prog_fedcba9876543210_other";

    #[test]
    fn code_at_address_of_other_code_has_its_own_name() {
        let (kernel, symbols) = fake();
        kernel.load(&[(7, ADDRESS, ONE)]);
        let mut users = [symbols.shared(), symbols.shared()];
        for user in &mut users {
            assert_eq!([FIXED + 8, ADDRESS + 8].map(|at| user.name(at).to_owned()), ["schedule", ONE]);
        }
        let (read, generation) = (kernel.read.get(), symbols.generation());
        kernel.next_span(&symbols);
        // Unloaded: the earlier code keeps its name while it may have run.
        kernel.load(&[]);
        kernel.next_span(&symbols);
        assert_ne!(symbols.generation(), generation);
        assert!(users.iter_mut().all(|user| user.name(ADDRESS + 8) == ONE));
        // Also if it was not looked up before.
        assert_eq!(users[0].name(ADDRESS + 16), ONE);
        assert_eq!(kernel.read.get(), read);
        kernel.next_span(&symbols);
        kernel.load(&[(8, ADDRESS, OTHER)]);
        kernel.next_span(&symbols);
        for user in &mut users {
            assert_eq!(
                [FIXED + 8, ADDRESS + 8, ADDRESS + 16].map(|at| user.name(at).to_owned()),
                ["schedule", OTHER, OTHER]
            );
        }
        users[0].look_up_all(&BTreeSet::from([ADDRESS + 24]));
        assert_eq!(users[0].names[&(ADDRESS + 24)].name, OTHER);
        assert!(kernel.read.get() <= read + 2, "{} readings", kernel.read.get());
    }

    #[test]
    fn address_with_two_programs_in_one_span_has_both_names() {
        let (kernel, symbols) = fake();
        kernel.load(&[(7, ADDRESS, ONE)]);
        let mut user = symbols.shared();
        assert_eq!(user.name(ADDRESS + 8), ONE);
        kernel.next_span(&symbols);
        kernel.load(&[(8, ADDRESS, OTHER)]);
        kernel.next_span(&symbols);
        let both = format!("{ONE} or {OTHER}");
        user.look_up_all(&BTreeSet::from([ADDRESS + 8, ADDRESS + 24]));
        assert_eq!([ADDRESS + 8, ADDRESS + 24].map(|at| user.name(at).to_owned()), [both.clone(), both]);
        assert!(!user.is_known(ADDRESS + 8));
        let generation = symbols.generation();
        kernel.next_span(&symbols);
        assert_ne!(symbols.generation(), generation);
        assert_eq!(user.name(ADDRESS + 8), OTHER);
        assert!(user.is_known(ADDRESS + 8));
        // Code that was never looked up has no name: the later code's name would be a guess.
        let (kernel, symbols) = fake();
        kernel.load(&[(7, ADDRESS, ONE)]);
        let mut user = symbols.shared();
        kernel.load(&[(8, ADDRESS, OTHER)]);
        kernel.next_span(&symbols);
        assert_eq!(user.name(ADDRESS + 8), format!("{:#x} or {OTHER}", ADDRESS + 8));
    }

    #[test]
    fn loading_code_keeps_other_names_without_rereading() {
        let (kernel, symbols) = fake();
        kernel.load(&[(7, ADDRESS, ONE)]);
        let mut user = symbols.shared();
        assert_eq!(user.name(ADDRESS + 8), ONE);
        let read = kernel.read.get();
        for id in 8..20 {
            kernel.load(&[(7, ADDRESS, ONE), (id, ADDRESS + 0x1000, OTHER)]);
            kernel.next_span(&symbols);
            assert_eq!(
                [FIXED + 8, FIXED + u64::from(id), ADDRESS + 8].map(|at| user.name(at).to_owned()),
                ["schedule", "schedule", ONE]
            );
        }
        assert_eq!(kernel.read.get(), read);
    }

    #[test]
    fn name_cache_is_bounded() {
        let (_, mut symbols) = fake();
        for address in 0..MAX_NAMES as u64 + 10 {
            symbols.name(FIXED + (address & 0xfff));
            symbols.name(ADDRESS * 2 + address);
        }
        assert!(symbols.names.len() <= MAX_NAMES, "{} names", symbols.names.len());
    }

    #[test]
    fn rereads_symbols_only_if_addresses_are_shown() {
        for is_hidden in [true, false] {
            let kernel = FakeKernel { is_hidden, ..FakeKernel::default() };
            let mut symbols = KernelSymbols::new(Box::new(kernel.clone()));
            // Unknown, as each address is if they are hidden.
            assert_eq!(symbols.name(0x10), "0x10");
            assert_eq!(kernel.read.get(), u32::from(!is_hidden));
            if let Some(symbols) = &mut symbols.shared.borrow_mut().symbols {
                symbols.read -= 2 * MIN_SYMBOLS_AGE;
            }
            assert_eq!(symbols.name(0x20), "0x20");
            assert_eq!(kernel.read.get(), if is_hidden { 0 } else { 2 });
        }
    }

    #[test]
    fn finds_kernel_text() {
        let kallsyms = "ffffffff81000000 T _stext\nffffffff82000000 T _etext\nffffffffc0000000 t x\t[ext4]\n";
        assert_eq!(fixed_in(kallsyms), Some(0xffff_ffff_8100_0000..0xffff_ffff_8200_0000));
        assert_eq!(fixed_in("0000000000000000 T _stext\n0000000000000000 T _etext\n"), None);
        assert_eq!(fixed_in("ffffffff81000000 T _text\n"), Some(0..0));
    }

    /// Loads a minimal program, and returns it with its address.
    #[allow(unsafe_code)]
    fn loaded(name: &std::ffi::CStr, value: i32) -> Option<(OwnedFd, u64)> {
        let instruction = |code: u32, imm| libbpf_sys::bpf_insn { code: code as u8, imm, ..Default::default() };
        // r0 = value; exit
        let instructions = [instruction(0xb7, value), instruction(0x95, 0)];
        let license = c"GPL";
        // SAFETY: the instructions and the names outlive the call.
        let raw = unsafe {
            libbpf_sys::bpf_prog_load(
                libbpf_sys::BPF_PROG_TYPE_SOCKET_FILTER,
                name.as_ptr(),
                license.as_ptr(),
                instructions.as_ptr(),
                instructions.len() as _,
                std::ptr::null_mut(),
            )
        };
        if raw < 0 {
            return None;
        }
        // SAFETY: a new descriptor with no other owner.
        let program = unsafe { OwnedFd::from_raw_fd(raw) };
        let newest = Listed::now(&BTreeSet::new()).functions.pop_last()?;
        Some((program, newest.1.first()?.start))
    }

    #[test]
    fn program_at_address_of_another_one_has_its_own_name() {
        if !rustix::process::geteuid().is_root() || fixed_in(&kallsyms().unwrap_or_default()).is_none() {
            println!("skipped: needs root and a kernel that shows addresses");
            return;
        }
        let Some((first, address)) = loaded(c"first_one", 1) else {
            println!("skipped: no program is compiled");
            return;
        };
        let session = KernelSymbols::default();
        let mut symbols = session.shared();
        let name = symbols.name(address).to_owned();
        assert!(name.contains("first_one"), "{name}");
        let ended = |began_ns| {
            std::thread::sleep(Duration::from_millis(30));
            session.span_ended("source", began_ns);
        };
        ended(Running.now_ns());
        drop(first);
        // The kernel loads a program of this size anywhere in the same page, and frees memory some time later.
        let mut others = Vec::new();
        let later = (0..3_000).find_map(|attempt| {
            if attempt % 30 == 29 {
                others.clear();
                std::thread::sleep(Duration::from_millis(20));
            }
            let (program, at) = loaded(c"later_one", 2)?;
            if at == address {
                return Some(program);
            }
            others.push(program);
            None
        });
        let Some(_later) = later else {
            println!("skipped: no other program came into its place");
            return;
        };
        // The list of loaded code may be this old.
        std::thread::sleep(Duration::from_nanos(MAX_LIST_AGE_NS + 10_000_000));
        let name = symbols.name(address).to_owned();
        assert!(name.contains("first_one or bpf_prog_") && name.ends_with("later_one"), "{name}");
        ended(Running.now_ns());
        assert!(symbols.name(address).ends_with("later_one") && !symbols.name(address).contains("first_one"));
    }
}
