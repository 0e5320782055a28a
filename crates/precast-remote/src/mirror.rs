//! Mirror: the records of all releases of a remote, in a store of their own, without the objects.
//!
//! Records are small, and what they say (what there is, why it was built, what differs, how large it is) needs no
//! object. So the commands that read a store read a remote with the code that they have.
//!
//! A release whose files can't be read is left out and named: the others can be looked at.

use std::{collections::BTreeSet, path::Path};

use precast_store::{
    ListedPart, Listing, PartKind, Store,
    transfer::{Flaw, Mirrored},
};

use crate::{
    error::RemoteError,
    event::Tell,
    remote::{Remote, foreign},
};

impl Remote {
    /// Writes the records of all releases into an empty folder, as a store.
    pub fn mirror(&self, folder: &Path, tell: &Tell<'_>) -> Result<Mirrored, RemoteError> {
        let store = Store::create(folder)?;
        let mut mirrored = Mirrored::default();
        let mut had = BTreeSet::new();
        for group in self.groups()? {
            for found in self.whole(&group)? {
                tell.go_on()?;
                let added = match found {
                    Ok((listing, text)) => self.add(&store, &listing, &text, &mut had),
                    Err(Flaw { name, why }) => Err(RemoteError::Damaged { name, why }),
                };
                match added {
                    Ok(records) => {
                        mirrored.releases += 1;
                        mirrored.records += records;
                    }
                    Err(RemoteError::Damaged { name, why }) => {
                        mirrored.left_out.push(Flaw { name, why });
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(mirrored)
    }

    /// Adds a release. `had` has the paths of the records that the store has. Returns the number of new ones.
    fn add(
        &self,
        store: &Store,
        listing: &Listing,
        text: &[u8],
        had: &mut BTreeSet<String>,
    ) -> Result<usize, RemoteError> {
        let new = listing
            .parts
            .iter()
            .filter(|part| part.kind != PartKind::Object);
        let new: Vec<&ListedPart> = new.filter(|part| !had.contains(&part.path())).collect();
        let mut records = Vec::new();
        for (part, text) in new.iter().zip(self.records(&new)?) {
            let text = text.ok_or_else(|| RemoteError::damaged(&part.path(), "it is missing"))?;
            part.check_record(&text).map_err(foreign)?;
            records.push((*part, text));
        }
        store.mirror(text, listing, &records).map_err(foreign)?;
        had.extend(new.iter().map(|part| part.path()));
        Ok(new.len())
    }
}
