// SPDX-License-Identifier: MIT OR Apache-2.0
use std::cell::Cell;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::sync::Arc;

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

    fn loaded(&self, known: &BTreeSet<u32>, _: bool) -> Listed {
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
    let newest = Listed::now(&BTreeSet::new(), true).functions.pop_last()?;
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
