// SPDX-License-Identifier: MIT OR Apache-2.0

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

/// The output of c++filt (binutils 2.40), except that it expands abbreviations such as `std::string`.
const NAMES: &[(&str, &str)] = &[
    ("_ZNSt6localeC2Ev", "std::locale::locale()"),
    ("_ZNSdD1Ev", "std::iostream::~basic_iostream()"),
    ("_ZTVSi", "vtable for std::istream"),
    ("_ZThn16_NSdD0Ev", "non-virtual thunk to std::iostream::~basic_iostream()"),
    ("_ZTv0_n24_NSdD0Ev", "virtual thunk to std::iostream::~basic_iostream()"),
    ("_ZNKSi6sentrycvbEv", "std::istream::sentry::operator bool() const"),
    ("_ZZN4llvm13hexDigitValueEcE3LUT", "llvm::hexDigitValue(char)::LUT"),
    (
        "_ZTIZN4llvm10ThreadPool19createTaskAndFutureESt8functionIFvvEEEUlvE_",
        "typeinfo for llvm::ThreadPool::createTaskAndFuture(std::function<void ()>)::{lambda()#1}",
    ),
    ("_ZTIPFvN4llvm5ErrorEE", "typeinfo for void (*)(llvm::Error)"),
    (
        "_ZNSt5dequeIjSaIjEE16_M_push_back_auxIJRKjEEEvDpOT_",
        "void std::deque<unsigned int, std::allocator<unsigned int> >::_M_push_back_aux<unsigned int const&>(unsigned int const&)",
    ),
    ("_ZGVNSt7collateIcE2idE", "guard variable for std::collate<char>::id"),
    (
        "_ZTIN4llvm6detail23provider_format_adapterIRA6_KcEE",
        "typeinfo for llvm::detail::provider_format_adapter<char const (&) [6]>",
    ),
    ("_ZL10DotCFGMSSAB5cxx11", "DotCFGMSSA[abi:cxx11]"),
    ("_ZTIN12_GLOBAL__N_13FPSE", "typeinfo for (anonymous namespace)::FPS"),
    ("_Z1fPFPFvicEdE", "f(void (*(*)(double))(int, char))"),
    ("_Z1fRA10_i", "f(int (&) [10])"),
    ("_Z1fM1AKFvvE", "f(void (A::*)() const)"),
    ("_Z1fIJicEEvDpRKT_", "void f<int, char>(int const&, char const&)"),
    ("_ZN1AIiE1fEv.isra.0.constprop.1", "A<int>::f() [clone .isra.0] [clone .constprop.1]"),
    ("_ZNO1A1fEv", "A::f() &&"),
    ("_ZNKR1A1fEv", "A::f() const &"),
    ("_Z1fILi3ELb1ELj7EEvv", "void f<3, true, 7u>()"),
    ("_ZplRK1AS1_", "operator+(A const&, A const&)"),
    ("_Z1fIPFiiEET_v", "int (*f<int (*)(int)>())(int)"),
    ("_ZNSsC1EPKcRKSaIcE", "std::string::basic_string(char const*, std::allocator<char> const&)"),
    ("_Znwm", "operator new(unsigned long)"),
    ("_Z1fDv4_f", "f(float __vector(4))"),
    ("_Z1fPKPVi", "f(int volatile* const*)"),
    ("_ZSt4moveIRiEONSt16remove_referenceIT_E4typeEOS2_", "std::remove_reference<int&>::type&& std::move<int&>(int&)"),
    ("_Z1fILN1A1BE2EEvv", "void f<(A::B)2>()"),
    ("_Z1fIL_Z1gvEEvv", "void f<g()>()"),
    // Expressions are skipped; types in them are substitution candidates.
    (
        "_ZN4llvm10checkedAddIiEENSt9enable_ifIXsr3std9is_signedIT_EE5valueENS_8OptionalIS2_EEE4typeES2_S2_",
        "std::enable_if<(...), llvm::Optional<int> >::type llvm::checkedAdd<int>(int, int)",
    ),
    ("_ZSt5beginI1AEDTcldtfp_5beginEERT_", "decltype(...) std::begin<A>(A&)"),
    ("_ZN4core3fmt9Formatter3pad17h0123456789abcdefE", "core::fmt::Formatter::pad"),
    ("_RNvCs1234_7mycrate3foo", "mycrate::foo"),
    // C functions, and invalid names.
    ("h", "h"),
    ("w", "w"),
    ("Rv", "Rv"),
    ("ZN1a1bE", "ZN1a1bE"),
    ("_Z", "_Z"),
    ("_Z1f", "f"),
    ("_Z9f", "_Z9f"),
    ("_ZN1aE\u{e9}", "_ZN1aE\u{e9}"),
    ("_ZN1a\u{e9}", "_ZN1a\u{e9}"),
    ("_ZN1aC\u{e9}", "_ZN1aC\u{e9}"),
];

#[test]
fn matches_binutils() {
    let differ = NAMES.iter().filter(|(symbol, name)| demangled(symbol) != *name);
    let differ: Vec<_> = differ.map(|(symbol, name)| (symbol, demangled(symbol), name)).collect();
    assert!(differ.is_empty(), "{differ:#?}");
}

/// A name in which each level is twelve times as long as the level before.
fn growing(levels: usize) -> String {
    let number = |number: usize| match number.checked_sub(1) {
        None => "S_".to_owned(),
        Some(above) => format!("S{}_", char::from_digit(above as u32, 36).expect("a digit").to_ascii_uppercase()),
    };
    let levels: String = (1..=levels).map(|level| format!("S_I{}E", number(level).repeat(12))).collect();
    format!("_Z1f1TI{}E{levels}", "i".repeat(12))
}

fn hostile() -> Vec<String> {
    let nested = [
        "P",
        "R",
        "K",
        "F",
        "A_",
        "M1a",
        "N1a",
        "1aI",
        "1aIJ",
        "S_I",
        "T_I",
        "SaI",
        "Dp",
        "DT",
        "Dt",
        "DTnw",
        "DTcl",
        "X",
        "U1a",
        "Z1f",
        "ZN1a",
        "Ul",
        "1aIL_Z1fI",
        "DtL",
        "AL",
        "DvL",
        "cv",
        "L",
        "C",
        "G",
        "1aIX",
        "nw",
        "qu",
        "St1aI",
        "Ts",
    ];
    let long = |unit: &str, start: &str, end: &str| {
        let times = (MAX_BYTES - start.len() - end.len()) / unit.len();
        format!("{start}{}{end}", unit.repeat(times))
    };
    let mut all: Vec<String> = (1..=10).map(growing).collect();
    for unit in nested {
        for start in ["_Z", "_Z1f", "_Z1fI", "_Z1fIX", "_Z1fDT", "_Z1fIJiiEEvDp"] {
            all.extend(["", "i", "v", "iEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE"].map(|end| long(unit, start, end)));
            all.push(format!("{start}{}i{}v", unit.repeat(90), "E".repeat(90)));
        }
    }
    // Packs of empty packs.
    let packs: String = (0..150).map(|level| format!("J{}E", format!("T{level}_").repeat(8))).collect();
    all.push(format!("_Z1fIJE{packs}EvDpT149_"));
    // Expansions of expansions.
    all.push(format!("_Z1fIJ{}EEv{}T_", "i".repeat(1_000), "Dp".repeat(200)));
    // Rust symbols with back references.
    for unit in ["NvC", "INv", "T", "B_", "TB_B_", "FK", "RR", "DNv", "p", "MC1a", "XC1aC1a"] {
        all.extend(["_R", "_RNvC1a1b", "_RINvC1a1bT"].map(|start| long(unit, start, "E")));
    }
    all.push(format!("_RINvC1a1b{}E", "TB9_B9_B9_B9_".repeat(100)));
    all
}

#[test]
fn hostile_name_is_bounded_in_time_memory_and_stack() {
    // Half of the default stack size of a thread.
    let measure = || {
        for symbol in hostile() {
            let began = Instant::now();
            let name = demangled(&symbol);
            assert!(name.len() <= MAX_BYTES, "{} bytes of {symbol}", name.len());
            assert!(began.elapsed() < Duration::from_secs(1), "{:?} for {symbol}", began.elapsed());
        }
    };
    let small = std::thread::Builder::new().stack_size(1 << 20).spawn(measure).expect("a thread");
    assert!(small.join().is_ok());
}

#[test]
fn truncates_long_names() {
    let name = demangled(&growing(5)).into_owned();
    assert!(name.starts_with("f(T<int, int, int") && name.ends_with("[cut]"), "{name}");
    let long = format!("_Z{}", "9".repeat(MAX_BYTES));
    assert_eq!(demangled(&long), bounded(&long), "longer ones are not even read");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn never_panics_on_any_name(parts in prop::collection::vec(prop::sample::select(vec![
        "T_", "T0_", "I", "S_", "S0_", "N", "1a", "2bc", "L", "J", "Dp", "DT", "X", "cv", "cl", "gs", "sr", "st", "fp_", "P", "F",
        "A", "_", "M", "K", "E", "i", "v", "nw", "il", "sp", "Z", "Ut_", "UlvE_", "C1", "D1", "B3abi", "qu", "Dv4_", "Do",
        "Li0E", "TV", "Th0_", "Tv0_n8_", "TC", "Sa", "Ss", "R", "O", "0", "9", "u3abc", ".isra", ".0", "\u{e9}", "on", "dn",
    ]), 0..60)) {
        let name = demangled(&format!("_Z{}", parts.concat())).into_owned();
        prop_assert!(name.len() <= MAX_BYTES);
    }
}
