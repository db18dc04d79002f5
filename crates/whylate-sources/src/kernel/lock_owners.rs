// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds in the kernel's types whether this kernel records the locks on which threads block.

use libbpf_rs::btf::types::{Ptr, Struct};
use libbpf_rs::{Btf, ReferencesType as _};

use super::error::AttachError;

/// Returns whether `task_struct.blocked_on` points to a mutex. Up to 6.16, a debug field has the same name.
pub(crate) fn has_mutex_in_blocked_on() -> Result<bool, AttachError> {
    Ok(target_of(&Btf::from_vmlinux()?, "task_struct", "blocked_on").is_some_and(|target| target == "mutex"))
}

/// Returns the name of the structure that a field points to, or an empty name; `None` if there is no such field.
pub(crate) fn target_of(types: &Btf<'_>, of: &str, field: &str) -> Option<String> {
    let of: Struct<'_> = types.type_by_name(of)?;
    let ty = of.iter().find(|member| member.name.is_some_and(|name| name == field))?.ty;
    let target = types.type_by_id::<Ptr<'_>>(ty).map(|pointer| pointer.referenced_type().skip_mods_and_typedefs());
    Some(target.and_then(|target| Some(target.name()?.to_string_lossy().into_owned())).unwrap_or_default())
}
