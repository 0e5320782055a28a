//! A repository: what the Hub is asked about it.

use std::{collections::BTreeMap, io::Cursor, sync::Arc};

use bytes::Bytes;
use reqwest::{Method, header};
use serde::Deserialize;
use url::Url;

use super::{
    address::Address,
    client::{Ask, Client},
    commit::{self, Change},
    lfs,
    stream::Streamed,
    tree::{self, Tree},
};
use crate::{
    carrier::{Body, Source},
    error::RemoteError,
};

/// A revision of a repository, and who asks.
pub struct Repo {
    pub client: Arc<Client>,
    pub at: Address,
}

impl Repo {
    /// Returns a URL of the repository's API.
    fn api<'a>(&'a self, parts: impl IntoIterator<Item = &'a str>) -> Url {
        let repo = ["api", "models", &self.at.owner, &self.at.repo];
        self.client.url(repo.into_iter().chain(parts))
    }

    /// Returns the answer to a question; none if there is no such thing.
    fn question(&self, url: Url, what: &'static str) -> Result<Option<Vec<u8>>, RemoteError> {
        let answer = self.client.text(&Ask {
            method: Method::GET,
            url,
            body: None,
            what,
            name: &self.client.repo,
            from: 0,
        })?;
        Ok(answer.map(|(_, text)| text))
    }

    fn read<'a, T: Deserialize<'a>>(&self, text: &'a [u8]) -> Result<T, RemoteError> {
        let read = serde_json::from_slice(text);
        read.map_err(|e| {
            RemoteError::damaged(
                &self.client.repo,
                format!("the Hub's answer can't be read: {e}"),
            )
        })
    }

    pub fn is_branch(&self) -> Result<bool, RemoteError> {
        #[derive(Deserialize)]
        struct Refs {
            branches: Vec<Branch>,
        }
        #[derive(Deserialize)]
        struct Branch {
            name: String,
        }
        let text = self.question(self.api(["refs"]), "look at")?;
        let text = text.ok_or_else(|| self.missing())?;
        let refs: Refs = self.read(&text)?;
        Ok((refs.branches.iter()).any(|branch| branch.name == self.at.revision))
    }

    fn missing(&self) -> RemoteError {
        let Address {
            owner,
            repo,
            revision,
        } = &self.at;
        RemoteError::NoRepository {
            url: self.client.url([]).to_string(),
            what: format!("repository `{owner}/{repo}` with a revision `{revision}`"),
        }
    }

    /// Returns the commit that the revision is.
    pub fn head(&self) -> Result<String, RemoteError> {
        #[derive(Deserialize)]
        struct Revision {
            sha: Option<String>,
        }
        let mut url = self.api(["revision", &self.at.revision]);
        url.set_query(Some("expand=sha"));
        let text = self
            .question(url, "look at")?
            .ok_or_else(|| self.missing())?;
        let found: Revision = self.read(&text)?;
        self.commit_id(found.sha.unwrap_or_default())
    }

    fn commit_id(&self, id: String) -> Result<String, RemoteError> {
        if (5..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Ok(id);
        }
        Err(RemoteError::damaged(
            &self.client.repo,
            "the Hub names no commit",
        ))
    }

    /// Commits changes on top of `parent`, and returns the commit. Fails with [`RemoteError::Moved`] if the branch has
    /// moved.
    pub fn commit(
        &self,
        summary: &str,
        parent: &str,
        changes: &BTreeMap<String, Change>,
    ) -> Result<String, RemoteError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Made {
            commit_oid: String,
        }
        let mut changes = changes.clone();
        self.upload_large(&mut changes)?;
        let body = commit::body(summary, parent, changes);
        let url = self.api(["commit", &self.at.revision]);
        let made: Made = self.read(&self.post(url, "application/x-ndjson", body)?)?;
        self.commit_id(made.commit_oid)
    }

    /// Returns the files below a folder of a commit.
    pub fn tree_of(&self, head: &str, folder: &str) -> Result<Tree, RemoteError> {
        let parts = folder.split('/').filter(|part| !part.is_empty());
        let mut url = self.api(["tree", head].into_iter().chain(parts));
        url.set_query(Some("recursive=true&expand=false"));
        let (name, mut tree) = (if folder.is_empty() { "/" } else { folder }, Tree::new());
        for _ in 0..tree::MOST_PAGES {
            let answer = self.client.text(&Ask {
                method: Method::GET,
                url: url.clone(),
                body: None,
                what: "list",
                name,
                from: 0,
            })?;
            // A folder that no file is in.
            let Some((headers, page)) = answer else {
                return Ok(tree);
            };
            tree::add(&mut tree, &page, name)?;
            let link = headers
                .get(header::LINK)
                .and_then(|link| link.to_str().ok());
            match link.and_then(tree::next) {
                None => return Ok(tree),
                Some(next) => url = self.client.named(&url, next, name)?,
            }
        }
        let why = format!("the Hub's list has more than {} pages", tree::MOST_PAGES);
        Err(RemoteError::damaged(name, why))
    }

    pub fn fetch(&self, head: &str, name: &str) -> Result<Option<Body>, RemoteError> {
        let Address { owner, repo, .. } = &self.at;
        let parts = [owner, repo, "resolve", head].into_iter();
        let url = self.client.url(parts.chain(name.split('/')));
        let found = Streamed::open(&self.client, url, name)?;
        Ok(found.map(|(bytes, file)| Body {
            bytes,
            read: Box::new(file),
        }))
    }

    /// Brings a large file to the Hub.
    pub fn upload(
        &self,
        name: &str,
        from: &mut dyn Source,
        bytes: u64,
    ) -> Result<Change, RemoteError> {
        let (owner, repo) = (self.at.owner.as_str(), format!("{}.git", self.at.repo));
        let batch = [owner, &repo, "info", "lfs", "objects", "batch"];
        let batch = self.client.url(batch);
        let pointer = lfs::upload(&self.client, &batch, &self.at.revision, name, from, bytes)?;
        Ok(Change::Large(pointer))
    }

    /// Brings those small files to the Hub that it wants as large ones, such as a listing of many parts.
    fn upload_large(&self, changes: &mut BTreeMap<String, Change>) -> Result<(), RemoteError> {
        /// As many as other clients ask about at once.
        const AT_ONCE: usize = 256;
        let mut large = Vec::new();
        let files = changes.iter().filter_map(|(name, change)| match change {
            Change::Small(bytes) => Some((name.as_str(), bytes.as_slice())),
            _ => None,
        });
        let files: Vec<_> = files.collect();
        for some in files.chunks(AT_ONCE) {
            let body = commit::question(some.iter().copied());
            let url = self.api(["preupload", &self.at.revision]);
            let answer = self.post(url, "application/json", body)?;
            let answer = commit::large(&answer);
            large.extend(answer.map_err(|why| RemoteError::damaged(&self.client.repo, why))?);
        }
        for name in large {
            if let Some(change) = changes.get_mut(&name)
                && let Change::Small(bytes) = change
            {
                let size = bytes.len() as u64;
                *change = self.upload(&name, &mut Cursor::new(bytes), size)?;
            }
        }
        Ok(())
    }

    fn post(&self, url: Url, kind: &'static str, body: Vec<u8>) -> Result<Vec<u8>, RemoteError> {
        let answer = self.client.text(&Ask {
            method: Method::POST,
            url,
            body: Some((kind, Bytes::from(body))),
            what: "commit to",
            name: &self.client.repo,
            from: 0,
        })?;
        Ok(answer.ok_or_else(|| self.missing())?.1)
    }
}
