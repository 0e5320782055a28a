//! A repository of the Hugging Face Hub, where a push is one commit.
//!
//! | function | the Hub's API |
//! |---|---|
//! | `head`, and in a push whether a file is there | the tree of a commit, read once |
//! | `get` | `resolve`, which redirects to the host that has the bytes |
//! | `list` | the tree of a folder |
//! | `create` of an object | the batch API of Git LFS: the bytes go to the Hub, and are no part of the repository yet |
//! | `create` of a record or a listing | nothing: it is kept in memory |
//! | `create` of a release, `finish` | a commit with all of these |
//!
//! Everything is read at one commit, the head of the branch at the start, so a reader never sees half of a push. A
//! commit names that head as its parent, and the Hub refuses it with 412 if the branch has moved: this is the condition
//! of a create. Then the new head is looked at. If it has the release, the caller takes the next number; if it has
//! another record of one of our keys, the push fails as it does elsewhere; else the commit is sent again. So a commit
//! whose answer was lost is safe to send again too.
//!
//! What can be computed again (`How::Any`: the list of releases) is not written, unless it is there already: a Hub
//! lists files, and each version of the list is a commit of its own.
//!
//! The crate `hf-hub` 1.0 would do some of this. But it uploads large files by the Xet protocol alone, which brings 95
//! more crates and a second library of TLS in C, and its files come from a path or from memory. The endpoints here are
//! those that the Python client `huggingface_hub` uses with `HF_HUB_DISABLE_XET`, which repositories with Xet have too.
//!
//! A push does not create the repository: whether it is public is for its owner to say.

mod address;
mod answer;
mod client;
mod commit;
mod lfs;
mod repo;
mod stream;
mod tree;

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Cursor, Read},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use precast_store::{listing_path, release_at};

use self::{
    address::{Address, Variables},
    client::Client,
    commit::Change,
    repo::Repo,
    tree::Tree,
};
use crate::{
    carrier::{Body, Carrier, How, LARGEST, Source},
    error::RemoteError,
};

/// A revision of a repository.
pub struct Hub {
    repo: Repo,
    /// Whether it is for a push, which asks for many files that are not there.
    of_push: bool,
    state: Mutex<State>,
}

/// What is known, and what the next commit has.
struct State {
    /// The commit that is read.
    head: String,
    /// Its files, once they are needed.
    tree: Option<Arc<Tree>>,
    changes: BTreeMap<String, Change>,
    /// Files that can be computed again, for this process.
    computed: BTreeMap<String, Vec<u8>>,
}

impl Hub {
    /// Opens a repository. A push needs a branch.
    pub fn open(text: &str, variables: Variables<'_>, of_push: bool) -> Result<Self, RemoteError> {
        let wrong = |why: String| RemoteError::Url {
            url: text.to_owned(),
            why,
        };
        let at = Address::parse(text).map_err(wrong)?;
        let endpoint = address::endpoint(variables).map_err(wrong)?;
        let read = |path: &std::path::Path| fs::read_to_string(path).ok();
        let token = address::token(variables, &read).map_err(wrong)?;
        let hub = Self {
            repo: Repo {
                client: Arc::new(Client::new(endpoint, token.as_deref(), &at)?),
                at,
            },
            of_push,
            state: Mutex::new(State {
                head: String::new(),
                tree: None,
                changes: BTreeMap::new(),
                computed: BTreeMap::new(),
            }),
        };
        if of_push && !hub.repo.is_branch()? {
            return Err(RemoteError::ReadOnly {
                url: text.to_owned(),
                why: "tags and commits are only read: name a branch",
            });
        }
        hub.look(&mut hub.state())?;
        Ok(hub)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks where the revision is. If a branch has moved, what others have written meanwhile is no change of ours any
    /// more. Fails if it is another record of one of our keys.
    fn look(&self, state: &mut State) -> Result<(), RemoteError> {
        let sha = self.repo.head()?;
        if sha == state.head {
            return Ok(());
        }
        // Before the new head counts: changes that are not compared with it must not be committed on top of it.
        let tree = match state.changes.is_empty() {
            true => None,
            false => Some(Arc::new(self.repo.tree_of(&sha, "")?)),
        };
        state.head = sha;
        state.tree = tree.clone();
        let Some(tree) = tree else {
            return Ok(());
        };
        let mut all = std::mem::take(&mut state.changes);
        let mut others = None;
        all.retain(|name, change| match (tree.get(name), change) {
            (None, change) => *change != Change::Deleted,
            (Some(_), Change::Deleted) => true,
            (Some(_), Change::Large(_)) => false,
            // A number that is another push's.
            (Some(_), _) if name.starts_with("releases/") || name.starts_with("cache/") => false,
            (Some(size), Change::Small(own)) => {
                if *size != own.len() as u64 || !self.is_there(&state.head, name, own) {
                    others = others.take().or(Some(name.clone()));
                }
                false
            }
        });
        state.changes = all;
        others.map_or(Ok(()), |name| {
            Err(RemoteError::Storage {
                what: "publish",
                name,
                why: "another push has created it meanwhile, from a build of its own".to_owned(),
            })
        })
    }

    /// Returns whether a file has these bytes.
    fn is_there(&self, head: &str, name: &str, bytes: &[u8]) -> bool {
        let found = self.repo.fetch(head, name).ok().flatten();
        let mut text = Vec::new();
        let read = found.map(|body| body.read.take(LARGEST).read_to_end(&mut text));
        matches!(read, Some(Ok(_))) && text == bytes
    }

    /// Returns the files of the commit that is read.
    fn tree(&self, state: &mut State) -> Result<Arc<Tree>, RemoteError> {
        if let Some(tree) = &state.tree {
            return Ok(tree.clone());
        }
        let tree = Arc::new(self.repo.tree_of(&state.head, "")?);
        state.tree = Some(tree.clone());
        Ok(tree)
    }

    /// Commits all changes. Returns false, and commits nothing, if others have created one of the files `taken`.
    fn commit(
        &self,
        state: &mut State,
        summary: &str,
        taken: &[String],
    ) -> Result<bool, RemoteError> {
        const TRIES: u64 = 50;
        for tried in 0..TRIES {
            let tree = self.tree(state)?;
            if taken.iter().any(|name| tree.contains_key(name)) {
                return Ok(false);
            }
            if state.changes.is_empty() {
                return Ok(true);
            }
            match self.repo.commit(summary, &state.head, &state.changes) {
                Ok(made) => {
                    state.head = made;
                    state.tree = Some(Arc::new(with(&tree, &state.changes)));
                    state.changes.clear();
                    return Ok(true);
                }
                Err(RemoteError::Moved { .. }) => {
                    thread::sleep(Duration::from_millis(50 * tried));
                    self.look(state)?;
                }
                Err(error) => return Err(error),
            }
        }
        Err(RemoteError::Storage {
            what: "commit to",
            name: self.repo.client.repo.clone(),
            why: format!("others were quicker {TRIES} times"),
        })
    }
}

/// Returns a tree with some changes.
fn with(tree: &Tree, changes: &BTreeMap<String, Change>) -> Tree {
    let mut tree = tree.clone();
    for (name, change) in changes {
        match change {
            Change::Large(pointer) => tree.insert(name.clone(), pointer.bytes),
            Change::Small(bytes) => tree.insert(name.clone(), bytes.len() as u64),
            Change::Deleted => tree.remove(name),
        };
    }
    tree
}

impl Carrier for Hub {
    fn head(&self, name: &str) -> Result<Option<u64>, RemoteError> {
        Ok(self.tree(&mut self.state())?.get(name).copied())
    }

    fn get(&self, name: &str) -> Result<Option<Body>, RemoteError> {
        let head = {
            let mut state = self.state();
            if let Some(text) = state.computed.get(name) {
                return Ok(Some(Body {
                    bytes: text.len() as u64,
                    read: Box::new(Cursor::new(text.clone())),
                }));
            }
            if self.of_push && !self.tree(&mut state)?.contains_key(name) {
                return Ok(None);
            }
            state.head.clone()
        };
        self.repo.fetch(&head, name)
    }

    fn create(
        &self,
        name: &str,
        from: &mut dyn Source,
        bytes: u64,
        how: How,
    ) -> Result<bool, RemoteError> {
        if how != How::Any && self.head(name)?.is_some() {
            return Ok(false);
        }
        if how == How::Content {
            let change = self.repo.upload(name, from, bytes)?;
            self.state().changes.insert(name.to_owned(), change);
            return Ok(true);
        }
        let mut text = Vec::new();
        let read = from.take(LARGEST).read_to_end(&mut text);
        let read = read.and_then(|read| match read as u64 == bytes {
            true => Ok(()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        });
        read.map_err(|source| RemoteError::Read {
            name: name.to_owned(),
            source,
        })?;
        let mut state = self.state();
        if how == How::Any {
            // One that another tool has brought there has to be right.
            if self.tree(&mut state)?.contains_key(name) {
                let change = Change::Small(text.clone());
                state.changes.insert(name.to_owned(), change);
            }
            state.computed.insert(name.to_owned(), text);
            return Ok(true);
        }
        state.changes.insert(name.to_owned(), Change::Small(text));
        let Some((model, seq)) = release_at(name) else {
            return Ok(true);
        };
        let taken = [name.to_owned(), listing_path(&model, seq)?];
        let done = self.commit(&mut state, &format!("Release {seq} of {model}"), &taken);
        if !matches!(done, Ok(true)) {
            state.changes.retain(|name, _| !taken.contains(name));
        }
        done
    }

    fn list(&self, folder: &str) -> Result<Option<Vec<String>>, RemoteError> {
        let mut state = self.state();
        self.look(&mut state)?;
        let tree = if self.of_push {
            self.tree(&mut state)?
        } else {
            Arc::new(self.repo.tree_of(&state.head, folder)?)
        };
        let inside = |name: &&String| {
            let rest = name.strip_prefix(folder);
            folder.is_empty() || rest.is_some_and(|rest| rest.starts_with('/'))
        };
        Ok(Some(tree.keys().filter(inside).cloned().collect()))
    }

    fn delete(&self, name: &str) -> Result<(), RemoteError> {
        let mut state = self.state();
        if !self.tree(&mut state)?.contains_key(name) {
            return Ok(());
        }
        // With what else waits, which shows nothing without a release.
        state.changes.insert(name.to_owned(), Change::Deleted);
        let done = self.commit(&mut state, &format!("Delete {name}"), &[]);
        state.changes.remove(name);
        done.map(|_| ())
    }

    fn refuses_twice(&self) -> Option<bool> {
        // By the parent of each commit.
        Some(true)
    }

    fn is_folder(&self) -> bool {
        false
    }

    /// Commits what a push created that needed no new release.
    fn finish(&self, _release: Option<&str>) -> Result<(), RemoteError> {
        self.commit(&mut self.state(), "Files that releases lacked", &[])?;
        Ok(())
    }
}
