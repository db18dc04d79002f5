// SPDX-License-Identifier: MIT OR Apache-2.0
//! The account of a session, shared by its sources.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::AccountState;
use crate::kernel::cpu_choice::Choice;
use crate::kernel::error::AttachError;

/// The CPUs of a session, and the account if several sources share it. The first source that needs the account determines
/// its timers.
pub(crate) struct SharedAccount {
    /// Whether several sources share the account; then none of them reports its cost.
    has_several: bool,
    /// Requested CPUs; empty for the usable ones.
    asked_cpus: Vec<u32>,
    cpus: RefCell<Option<Rc<Choice>>>,
    state: RefCell<Option<Rc<RefCell<AccountState>>>>,
}

impl SharedAccount {
    /// Creates the state of a session on these CPUs; on the usable ones if empty.
    pub(crate) fn new(has_several: bool, asked_cpus: &[u32]) -> Self {
        SharedAccount {
            has_several,
            asked_cpus: asked_cpus.to_vec(),
            cpus: RefCell::default(),
            state: RefCell::default(),
        }
    }

    /// Returns the CPUs that are measured; see [`crate::Session::cpus`].
    pub(crate) fn cpus(&self, asked: &[u32]) -> Result<Rc<Choice>, AttachError> {
        let known = self.cpus.borrow().clone();
        match known {
            Some(known) if asked.is_empty() || known.measured == asked => Ok(known),
            Some(_) => Choice::here(asked).map(Rc::new),
            None => {
                let choice = Choice::here(if asked.is_empty() { &self.asked_cpus } else { asked })?;
                Ok(Rc::clone(self.cpus.borrow_mut().insert(Rc::new(choice))))
            }
        }
    }

    /// Attaches the account, once all sources are attached.
    ///
    /// # Errors
    /// Fails if the kernel refuses a BPF program.
    pub(crate) fn begin(&self) -> Result<(), AttachError> {
        self.state.borrow().as_ref().map_or(Ok(()), |state| state.borrow_mut().attach(true))
    }

    /// Detaches the account's programs for good.
    pub(crate) fn end(&self) {
        self.state.borrow().iter().for_each(|state| state.borrow_mut().detach());
    }

    /// Returns the number of events that the account has lost since the last call, by reason.
    pub(crate) fn take_lost(&self) -> BTreeMap<String, u64> {
        let state = self.state.borrow();
        let lost = state.iter().flat_map(|state| state.borrow_mut().take_lost());
        lost.map(|(reason, count)| (reason.to_owned(), count)).collect()
    }

    /// Returns the shared account, which `load` creates for the first source; `None` if a single source has its own.
    pub(super) fn account(
        &self,
        load: impl FnOnce() -> Result<AccountState, AttachError>,
    ) -> Result<Option<Rc<RefCell<AccountState>>>, AttachError> {
        if !self.has_several {
            return Ok(None);
        }
        let known = self.state.borrow().clone();
        let state = match known {
            Some(state) => state,
            None => Rc::new(RefCell::new(load()?)),
        };
        Ok(Some(Rc::clone(self.state.borrow_mut().insert(state))))
    }
}
