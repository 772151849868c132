-- Whose turn it is. One sorted set a model has the batches with ready shards, first come first:
--
--   score = (TOP_CLASS - class) * SPAN + virtual time
--           '-- higher class first --'   '-- then who had least: rows leased / weight --'
--
-- A batch that gets nothing for AGE_MS rises by one class; what it is given then puts it back.

local SPAN = 2 ^ 40

local function class_of(score)
  return TOP_CLASS - math.floor(score / SPAN)
end

-- One that comes late starts level with the others of its class, or it would shut them out.
local function enter(key, batch, class, vtime)
  local base = (TOP_CLASS - class) * SPAN
  local least = redis.call('ZRANGEBYSCORE', key, exact(base), '(' .. exact(base + SPAN),
    'WITHSCORES', 'LIMIT', 0, 1)
  local start = math.max(vtime, least[2] and least[2] - base or 0)
  redis.call('ZADD', key, exact(base + start), batch)
end

local function rest(batch, model)
  redis.call('ZREM', K.runnable .. model, batch)
  redis.call('ZREM', K.aging, batch)
end

local function has_ready(batch)
  return redis.call('EXISTS', K.ready .. batch, K.shared .. batch, K.suspects .. batch) > 0
end

local function rest_if_empty(batch)
  local model = redis.call('HGET', K.batch .. batch, 'model_key')
  if model and not has_ready(batch) then
    rest(batch, model)
  end
end

local function make_runnable(batch)
  local state, model, vtime, class =
    unpack(redis.call('HMGET', K.batch .. batch, 'st', 'model_key', 'vt', 'prio'))
  if state ~= 'running' or not has_ready(batch) then
    return
  end
  if not redis.call('ZSCORE', K.runnable .. model, batch) then
    enter(K.runnable .. model, batch, tonumber(class), tonumber(vtime or '0'))
    redis.call('ZADD', K.aging, digits(now_ms() + AGE_MS), batch)
  end
end

-- The batch was given `rows` rows.
local function served(batch, model, rows)
  local key = K.runnable .. model
  local class, weight, vtime =
    unpack(redis.call('HMGET', K.batch .. batch, 'prio', 'weight', 'vt'))
  local base = (TOP_CLASS - class) * SPAN
  local score = redis.call('ZSCORE', key, batch)
  if class_of(tonumber(score)) == tonumber(class) then
    vtime = score - base
  else -- it had risen
    redis.call('ZREM', key, batch)
    enter(key, batch, class, tonumber(vtime or '0'))
    vtime = redis.call('ZSCORE', key, batch) - base
  end
  vtime = vtime + rows / weight
  redis.call('ZADD', key, exact(base + vtime), batch)
  redis.call('HSET', K.batch .. batch, 'vt', exact(vtime))
  redis.call('ZADD', K.aging, digits(now_ms() + AGE_MS), batch)
end

local function rise()
  local now = now_ms()
  local due = redis.call('ZRANGEBYSCORE', K.aging, '-inf', digits(now), 'LIMIT', 0, 16)
  for _, batch in ipairs(due) do
    local model = redis.call('HGET', K.batch .. batch, 'model_key')
    local key = K.runnable .. (model or '')
    local score = redis.call('ZSCORE', key, batch)
    if not score then
      redis.call('ZREM', K.aging, batch)
    else
      local class = class_of(tonumber(score))
      if class < TOP_CLASS then
        redis.call('ZREM', key, batch)
        enter(key, batch, class + 1, 0)
      end
      redis.call('ZADD', K.aging, digits(now + AGE_MS), batch)
    end
  end
end

-- batch, class, weight or '' -> 1, or 0 when it is unknown or over
function operation.priority()
  local batch, class, weight = unpack(ARGV, 2)
  local state, model = unpack(redis.call('HMGET', K.batch .. batch, 'st', 'model_key'))
  if not state or next(BATCH[state]) == nil then
    return 0
  end
  redis.call('HSET', K.batch .. batch, 'prio', class)
  if weight ~= '' then
    redis.call('HSET', K.batch .. batch, 'weight', weight)
  end
  rest(batch, model)
  make_runnable(batch)
  return 1
end
