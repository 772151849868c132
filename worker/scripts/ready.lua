-- The ready shards of a batch, by the prefix they share. A group is in one of two places:
--
--   ready   groups that no worker is at -> number of their first shard (prefix order)
--   shared  groups that some are at     -> ready shards a worker, to steal where there are most
--
-- Shards without a group ('') share nothing, so nobody is ever at them. Suspects wait apart: one
-- of them is leased alone and to empty hands. `owners` counts the shards a worker holds of a
-- group ('group|worker') and the workers at it ('group').

local function list_of(batch, group)
  return K.group .. batch .. ':' .. group
end

local function number_of(shard)
  return tonumber(string.match(shard, '%-(%d+)[^%-]*$') or '0')
end

-- Puts a group where it belongs after a change.
local function refresh(batch, group)
  local waiting = redis.call('LLEN', list_of(batch, group))
  local owners = tonumber(redis.call('HGET', K.owners .. batch, group) or '0')
  if waiting > 0 and owners == 0 then
    local first = redis.call('LINDEX', list_of(batch, group), 0)
    redis.call('ZADD', K.ready .. batch, number_of(first), group)
  else
    redis.call('ZREM', K.ready .. batch, group)
  end
  if waiting > 0 and owners > 0 then
    redis.call('ZADD', K.shared .. batch, exact(waiting / owners), group)
  else
    redis.call('ZREM', K.shared .. batch, group)
  end
end

local function count_owner(batch, group, worker, by)
  if group == '' then
    return
  end
  local field = group .. '|' .. worker
  local held = redis.call('HINCRBY', K.owners .. batch, field, by)
  if held <= 0 then
    redis.call('HDEL', K.owners .. batch, field)
    if redis.call('HINCRBY', K.owners .. batch, group, -1) <= 0 then
      redis.call('HDEL', K.owners .. batch, group)
    end
  elseif held == by then
    redis.call('HINCRBY', K.owners .. batch, group, 1)
  end
  refresh(batch, group)
end

-- Shows a shard as ready, before the others: its rows were already begun.
local function show(shard, batch, group, deaths)
  if deaths > 0 then
    redis.call('LPUSH', K.suspects .. batch, shard)
  else
    redis.call('LPUSH', list_of(batch, group), shard)
    refresh(batch, group)
  end
end

local function hide(shard, batch, group)
  if redis.call('LREM', K.suspects .. batch, 1, shard) == 0 then
    redis.call('LREM', list_of(batch, group), 1, shard)
    refresh(batch, group)
  end
end

-- Another worker that lives has the prefix in its cache.
local function hot_elsewhere(group, worker)
  local other = group ~= '' and redis.call('GET', K.hot .. group)
  return other and other ~= worker and redis.call('EXISTS', K.worker .. other) == 1
end

-- The group for a worker: one it has hot, else one nobody is at, else where most is left for each.
local function choose(batch, worker, hot)
  for _, group in ipairs(hot) do
    if redis.call('LLEN', list_of(batch, group)) > 0 then
      return group
    end
  end
  local free = redis.call('ZRANGE', K.ready .. batch, 0, 15)
  for _, group in ipairs(free) do
    if not hot_elsewhere(group, worker) then
      return group
    end
  end
  return free[1] or redis.call('ZREVRANGE', K.shared .. batch, 0, 0)[1]
end

-- Takes the next shard out of its list -> shard, group, whether it is a suspect; or nil
local function pick(batch, worker, hot, busy)
  local suspect = not busy and redis.call('LPOP', K.suspects .. batch)
  if suspect then
    return suspect, redis.call('HGET', K.shard .. suspect, 'g'), true
  end
  local group = choose(batch, worker, hot)
  if not group then
    return nil
  end
  local shard = redis.call('LPOP', list_of(batch, group))
  refresh(batch, group)
  return shard, group, false
end
