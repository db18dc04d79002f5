// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of the kernel's data, such as static locks, where /proc/kallsyms lists them (`CONFIG_KALLSYMS_ALL`).

use super::kallsyms::{data_of, fixed_in, kallsyms};

/// Maximum distance of static data from the kernel's code. Other memory is allocated elsewhere.
const MAX_DISTANCE: u64 = 1 << 31;

/// Symbols of data by address. They are read with the first address that may be of static data.
#[derive(Debug, Default)]
pub(crate) struct DataSymbols {
    /// Start of the kernel's code; 0 if addresses are hidden.
    code_at: Option<u64>,
    /// In order of addresses.
    symbols: Option<Vec<(u64, Box<str>)>>,
}

impl DataSymbols {
    /// Returns the name of what begins at this address, if it is static. Symbols have no sizes, so a part of something
    /// larger has no name.
    pub(crate) fn name(&mut self, address: u64) -> Option<String> {
        let start = || kallsyms().ok().and_then(|text| fixed_in(&text)).map_or(0, |code| code.start);
        let code_at = *self.code_at.get_or_insert_with(start);
        if code_at == 0 || address.abs_diff(code_at) > MAX_DISTANCE {
            return None;
        }
        let symbols = self.symbols.get_or_insert_with(|| {
            let mut symbols = data_of(&kallsyms().unwrap_or_default());
            symbols.sort_unstable();
            symbols
        });
        let at = symbols.partition_point(|&(begins, _)| begins < address);
        symbols.get(at).filter(|(begins, _)| *begins == address).map(|(_, name)| name.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_static_data_that_begins_at_the_address_has_a_name() {
        let text = "ffffffff81000000 T _stext\nffffffff82000010 d cgroup_mutex\nffffffff82000010 t code\n\
                    ffffffff82000040 B rtnl_mutex\nffffffffc0000000 d a_mutex\t[module]\n";
        let mut symbols = DataSymbols { code_at: Some(0xffff_ffff_8100_0000), symbols: Some(data_of(text)) };
        assert_eq!(symbols.name(0xffff_ffff_8200_0010).as_deref(), Some("cgroup_mutex"));
        assert_eq!(symbols.name(0xffff_ffff_8200_0040).as_deref(), Some("rtnl_mutex"));
        assert_eq!(symbols.name(0xffff_ffff_c000_0000).as_deref(), Some("a_mutex"));
        assert_eq!(symbols.name(0xffff_ffff_8200_0048), None);
        assert_eq!(symbols.name(0xffff_8880_0000_0000), None);
        let mut hidden = DataSymbols { code_at: Some(0), symbols: None };
        assert_eq!(hidden.name(0xffff_ffff_8200_0010), None);
    }
}
